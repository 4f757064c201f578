// SPDX-License-Identifier: Apache-2.0
// CPU path. A task is a run of queries. A query whose blocks are no more than top_k takes them all without a score; the
// others score theirs by dot products that look at one query and one block key alone, and find the top_k by partition.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <numeric>

#include "sluice/kernels/block_top_k/block_top_k.h"
#include "sluice/kernels/block_top_k/inputs.h"
#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

// Scores of one query, q [heads, dim], for keys [blocks, dim].
template <typename Scalar>
SLUICE_MULTIARCH void score_blocks(const Scalar* q, const Scalar* keys, std::int64_t heads, std::int64_t dim,
                                   std::int64_t blocks, Wide<Scalar> scale, Wide<Scalar>* scores) {
  using Real = Wide<Scalar>;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const auto* key = keys + b * dim;
    Real sum = 0;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto* query = q + h * dim;
      const auto product =
          lane_sum<Real>(dim, [query, key](std::int64_t i) { return widen(query[i]) * widen(key[i]); });
      sum += product > 0 ? product : 0;  // 0 for a NaN too, so that scores have an order
    }
    scores[b] = sum * scale;
  }
}

// Room of one task.
template <typename Real>
struct Scratch {
  std::vector<Real> scores;
  std::vector<std::int32_t> order;
};

// The `top_k` blocks of the highest scores, in rising order.
template <typename Real>
void choose(Scratch<Real>& scratch, std::int64_t blocks, std::int64_t top_k, std::int32_t* chosen) {
  auto& order = scratch.order;
  order.resize(blocks);
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&scores = scratch.scores](std::int32_t a, std::int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  std::nth_element(order.begin(), order.begin() + (top_k - 1), order.end(), before);
  std::sort(order.begin(), order.begin() + top_k);
  std::copy_n(order.begin(), top_k, chosen);
}

Tensor block_top_k_cpu(const Tensor& q, const Tensor& block_keys, const Tensor& cu_seqlens_q, const Tensor& cu_blocks,
                       const Tensor& seqused_k, std::int64_t block_size, std::int64_t top_k, double scale) {
  check_block_top_k(q, block_keys, cu_seqlens_q, cu_blocks, seqused_k, block_size, top_k, scale);
  const auto sequences = block_sequences(q, block_keys, cu_seqlens_q, cu_blocks, seqused_k, block_size);
  const auto dense_q = q.contiguous(), dense_keys = block_keys.contiguous();
  const auto heads = q.size(1), dim = q.size(2);
  auto result = at::full({q.size(0), top_k}, -1, q.options().dtype(kInt));
  auto* chosen = result.mutable_data_ptr<std::int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, q.scalar_type(), "block_top_k", [&] {
    const auto *queries = dense_q.const_data_ptr<scalar_t>(), *keys = dense_keys.const_data_ptr<scalar_t>();
    for (const auto& s : sequences) {
      const auto run = [&](std::int64_t first, std::int64_t last) {
        Scratch<Wide<scalar_t>> scratch;
        for (auto i = first; i < last; ++i) {
          const auto blocks = s.blocks(i), token = s.q_begin + i;
          if (blocks <= top_k) {
            std::iota(chosen + token * top_k, chosen + token * top_k + blocks, 0);
            continue;
          }
          scratch.scores.resize(blocks);
          score_blocks(queries + token * heads * dim, keys + s.block_begin * dim, heads, dim, blocks,
                       static_cast<Wide<scalar_t>>(scale), scratch.scores.data());
          choose(scratch, blocks, top_k, chosen + token * top_k);
        }
      };
      at::parallel_for(0, s.q_count, rows_per_task(s.key_count / block_size * heads * dim), run);
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) { m.impl("block_top_k", block_top_k_cpu); }

}  // namespace sluice
