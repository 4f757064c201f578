// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/attention_inputs.h"

#include "sluice/core/error.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {

void check_attention_inputs(std::string_view op, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                            const std::optional<Tensor>& seqused_k) {
  check_float_type(op, "q", q);
  SLUICE_CHECK(
      q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && k.size(1) > 0 && q.size(1) % k.size(1) == 0 &&
          k.size(2) == q.size(2) && v.size(0) == k.size(0) && v.size(1) == k.size(1) && q.size(2) > 0,
      "{}: q must be [Tq, Hq, d], k [Tk, Hkv, d] and v [Tk, Hkv, dv] with Hq a multiple of Hkv; got q {}, k {}, "
      "v {}",
      op, describe(q), describe(k), describe(v));
  SLUICE_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
               "{}: q, k and v must have one dtype; got q {}, k {}, v {}", op, describe(q), describe(k), describe(v));
  check_cu_seqlens(op, cu_seqlens_q);
  check_cu_seqlens(op, cu_seqlens_k);
  SLUICE_CHECK(cu_seqlens_k.size(0) == cu_seqlens_q.size(0),
               "{}: cu_seqlens_q and cu_seqlens_k must name the same sequences; got {} and {} of them", op,
               cu_seqlens_q.size(0) - 1, cu_seqlens_k.size(0) - 1);
  if (seqused_k) {
    SLUICE_CHECK(
        seqused_k->dim() == 1 && seqused_k->size(0) == cu_seqlens_q.size(0) - 1 && seqused_k->scalar_type() == kInt,
        "{}: seqused_k must be int32 [N={}]; got {}", op, cu_seqlens_q.size(0) - 1, describe(*seqused_k));
  }
}

std::vector<KeyedSequence> keyed_sequences(std::string_view op, const Tensor& q, const Tensor& k,
                                           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                           const std::optional<Tensor>& seqused_k) {
  const auto q_bounds = checked_bounds(fmt::format("{}, cu_seqlens_q", op), cu_seqlens_q, q.size(0));
  const auto k_bounds = seqused_k ? sequence_bounds(cu_seqlens_k)
                                  : checked_bounds(fmt::format("{}, cu_seqlens_k", op), cu_seqlens_k, k.size(0));
  const auto used = seqused_k ? seqused_k->contiguous() : Tensor();
  std::vector<KeyedSequence> sequences;
  for (std::size_t n = 0; n + 1 < q_bounds.size(); ++n) {
    const auto begin = k_bounds[n];
    const std::int64_t count = seqused_k ? used.const_data_ptr<std::int32_t>()[n] : k_bounds[n + 1] - begin;
    SLUICE_CHECK(begin >= 0 && count >= 0 && begin + count <= k.size(0),
                 "{}: the {} keys of sequence {} begin at row {} of k, which has {} rows.\n"
                 "  They must lie inside it: cu_seqlens_k[{}] + seqused_k[{}] <= Tk.",
                 op, count, n, begin, k.size(0), n, n);
    sequences.push_back(
        {.q_begin = q_bounds[n], .q_count = q_bounds[n + 1] - q_bounds[n], .k_begin = begin, .k_count = count});
  }
  return sequences;
}

void check_apart(std::string_view op, std::vector<KeyedSequence> sequences) {
  std::ranges::sort(sequences, {}, &KeyedSequence::k_begin);
  std::int64_t end = 0;
  for (const auto& s : sequences) {
    if (s.k_count == 0) continue;
    SLUICE_CHECK(
        s.k_begin >= end,
        "{}: two sequences share the keys from row {} on; gradients are computed only for sequences whose keys "
        "do not overlap",
        op, s.k_begin);
    end = s.k_begin + s.k_count;
  }
}

}  // namespace sluice
