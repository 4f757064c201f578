// SPDX-License-Identifier: Apache-2.0
// The launchers of params.h: what runs in which order, and where intermediate results lie.
#include "sluice/kernels/block_sparse_attention/sm90.cuh"

namespace sluice {
namespace sm90 {

SparseWorkspace make_workspace(const SparseParams& params, bool backward) {
  SparseWorkspace workspace{};
  size_t used = 0;
  const auto take = [&]<class T>(T*& pointer, size_t count) {
    pointer = reinterpret_cast<T*>(static_cast<char*>(params.workspace) + used);
    used += (count * sizeof(T) + 15) / 16 * 16;
  };
  take(workspace.first_query_tile, params.sequences + 1);
  take(workspace.first_key_tile, params.sequences + 1);
  take(workspace.union_count, query_tile_bound(params));
  take(workspace.unions, list_place(params, params.q_tokens));
  if (backward) {
    const size_t rows = static_cast<size_t>(params.q_tokens) * params.heads;
    take(workspace.attender_count, key_tile_bound(params));
    take(workspace.first_attender, key_tile_bound(params));
    take(workspace.lse2, rows);
    take(workspace.delta, rows);
  }
  workspace.bytes = used;
  return workspace;
}

}  // namespace sm90

size_t block_sparse_attention_workspace_bytes(const BlockSparseAttentionParams& params) {
  return sm90::make_workspace(params, false).bytes;
}
size_t block_sparse_attention_backward_workspace_bytes(const BlockSparseAttentionParams& params) {
  return sm90::make_workspace(params, true).bytes;
}

cudaError_t launch_block_sparse_attention_sm90(const BlockSparseAttentionParams& params, cudaStream_t stream) {
  const sm90::SparseWorkspace workspace = sm90::make_workspace(params, false);
  cudaError_t error = sm90::launch_tile_index(params, workspace, stream);
  if (error == cudaSuccess) error = sm90::launch_unions(params, workspace, stream);
  if (error == cudaSuccess) error = sm90::launch_sparse_forward(params, workspace, stream);
  return error;
}

cudaError_t launch_block_sparse_attention_backward_sm90(const BlockSparseAttentionBackwardParams& params,
                                                        cudaStream_t stream) {
  const BlockSparseAttentionParams& forward = params.forward;
  const sm90::SparseWorkspace workspace = sm90::make_workspace(forward, true);
  cudaError_t error = sm90::launch_row_sums(params, workspace, stream);
  if (error == cudaSuccess) error = sm90::launch_tile_index(forward, workspace, stream);
  if (error == cudaSuccess) error = sm90::launch_unions(forward, workspace, stream);
  if (error == cudaSuccess) error = sm90::launch_query_gradients(params, workspace, stream);
  if (error == cudaSuccess) error = sm90::launch_attenders(forward, workspace, stream);
  if (error == cudaSuccess) error = sm90::launch_key_gradients(params, workspace, stream);
  return error;
}

}  // namespace sluice
