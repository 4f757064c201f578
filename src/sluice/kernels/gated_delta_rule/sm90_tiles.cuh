// SPDX-License-Identifier: Apache-2.0
// Tiles [64 tokens, 64 columns] of rows in global memory, carried to and from shared memory by the copy engine. What it
// brings needs no fence before the tensor cores read it, which takes 160 cycles where a chain of products waits for it.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "sluice/kernels/gated_delta_rule/sm90.cuh"

namespace sluice::sm90 {

// Rows of tokens, [tokens, columns], `stride` elements apart.
struct TokenRows {
  CUtensorMap map;
  const bf16* data;
  int64_t stride;
};

// The driver's cuTensorMapEncodeTiled, looked up once; null where there is none.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    const bool is_there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function) : nullptr;
  }();
  return encoder;
}

// `data` is written by store_token_tile alone.
inline cudaError_t make_token_rows(TokenRows& rows, const bf16* data, int tokens, int columns, int64_t stride) {
  rows.data = data;
  rows.stride = stride;
  if (tokens == 0 || data == nullptr) return cudaSuccess;  // nothing is read or written
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(tokens)};
  const cuuint64_t distance[] = {static_cast<cuuint64_t>(stride) * sizeof(bf16)};
  const cuuint32_t box[] = {kHalf, kChunk}, steps[] = {1, 1};
  const CUresult result = encode(&rows.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(data), size,
                                 distance, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The tile whose first element is at that token and column, to a barrier; the copy engine adds tile_arrival_bytes.
// With fewer than kChunk rows, which are followed by another sequence's, the threads copy what is there and fill up
// with zeros themselves; they report by copy_arrive, and readers through the tensor cores fence. One warp.
__device__ inline void load_token_tile(uint32_t tile, const TokenRows& source, int64_t token, int column, int rows,
                                       uint32_t barrier, int lane) {
  if (rows < kChunk) {
    copy_token_tile<32>(tile, source.data + token * source.stride + column, source.stride, rows, lane);
  } else if (lane == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(tile),
        "l"(&source.map), "r"(column), "r"(static_cast<int>(token)), "r"(barrier)
        : "memory");
  }
}
__device__ inline uint32_t tile_arrival_bytes(int rows) { return rows < kChunk ? 0 : kTile; }

// The other way, the first `rows` of a tile, which its writers have left. One warp, and one committed group of lane 0;
// the tile is free once all lanes are through and that group has been read.
__device__ inline void store_token_tile(const TokenRows& destination, int64_t token, int column, int rows,
                                        const uint8_t* tile, int lane) {
  if (rows < kChunk) {
    store_token_tile<32>(const_cast<bf16*>(destination.data) + token * destination.stride + column, destination.stride,
                         rows, tile, lane);
  } else if (lane == 0) {
    fence_async_proxy();
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&destination.map),
        "r"(column), "r"(static_cast<int>(token)), "r"(shared_address(tile))
        : "memory");
  }
  if (lane == 0) bulk_store_commit();
}

}  // namespace sluice::sm90
