// SPDX-License-Identifier: Apache-2.0
// From tensors to device code: what the cuda.cpp of several operators share.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "sluice/core/error.h"
#include "sluice/core/tensor.h"

namespace sluice {

inline void check_launch(std::string_view op, cudaError_t error) {
  SLUICE_CHECK(error == cudaSuccess, "{}: launch failed: {}", op, cudaGetErrorString(error));
}

inline const __nv_bfloat16* bf16_data(const Tensor& x) { return static_cast<const __nv_bfloat16*>(x.const_data_ptr()); }
inline __nv_bfloat16* mutable_bf16_data(const Tensor& x) { return static_cast<__nv_bfloat16*>(x.mutable_data_ptr()); }

// float32 and bfloat16 are what the kernels compute with.
inline bool is_bfloat16(std::string_view op, std::string_view name, const Tensor& x) {
  SLUICE_CHECK(x.scalar_type() == kFloat || x.scalar_type() == kBFloat16,
               "{}: on a GPU {} must be float32 or bfloat16; got {}", op, name, describe(x));
  return x.scalar_type() == kBFloat16;
}

// x itself where neighbours in its last dim are neighbours in memory, else a dense copy.
inline Tensor with_dense_rows(const Tensor& x) {
  return x.numel() == 0 || x.size(-1) == 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

// [T, heads, dim] with dense heads within a token and rows that start at multiples of 16 bytes; the tokens may lie
// further apart (a slice of a wider projection). Anything else is copied.
inline bool has_dense_heads(const Tensor& x) {
  const bool dense = x.stride(2) == 1 && x.stride(1) == x.size(2);
  const auto pieces = 16 / x.element_size();
  return dense && x.stride(0) % pieces == 0 && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}
inline Tensor dense_heads(const Tensor& x) { return has_dense_heads(x) ? x : x.clone(at::MemoryFormat::Contiguous); }

inline void check_device(std::string_view op, std::string_view name, const Tensor& x, const Tensor& like) {
  SLUICE_CHECK(x.device() == like.device(), "{}: {} must be on {}, as the others; it is on {}", op, name,
               like.device().str(), x.device().str());
}

}  // namespace sluice
