// SPDX-License-Identifier: Apache-2.0
// CPU path. Tokens are cut into blocks and channels into chunks; a task walks the tokens of one block through one
// chunk, whose W latest rows stay in the first-level cache. A row of u is a pointer: to a token of x, or to a row of
// the state before the sequence, laid out [N, W - 1, C] here. With s the sum before the activation:
//   ds_t = dy_t a'(s_t)      du_p = sum over j of weight_j ds_{p + (W - 1) - j}      dw_j = sum of ds_t u_{t - (W - 1)
//   + j}
// du of a token is dx, of a row before the sequence the gradient of the initial state; rows that the final state kept
// add its gradient. A block computes ds for W - 1 tokens beyond its end again rather than waiting for its neighbour.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "sluice/kernels/causal_conv/causal_conv.h"
#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

constexpr std::int64_t kTokens = 128;    // of a block: the rows computed twice are then 3 in 128
constexpr std::int64_t kChannels = 256;  // of a chunk: weights, their gradients and W rows of ds fit in 16 KiB

// The width is known to the compiler for the published models' 4, so that sums over taps stay in registers; 0 stands
// for any other, which runs without vector code.
template <int kWidth>
SLUICE_INLINE std::int64_t taps_of(std::int64_t width) {
  return kWidth > 0 ? kWidth : width;
}

// weight[tap * stride + i] is tap `tap` of channel i; rows[tap] the row of u that it meets.
template <int kWidth, typename Scalar>
SLUICE_INLINE Wide<Scalar> convolve(const Scalar* const* rows, const Wide<Scalar>* weight, std::int64_t stride,
                                    std::int64_t width, std::int64_t i) {
  Wide<Scalar> sum = 0;
  for (std::int64_t tap = 0; tap < taps_of<kWidth>(width); ++tap) sum += weight[tap * stride + i] * widen(rows[tap][i]);
  return sum;
}

template <int kWidth, typename Scalar>
SLUICE_MULTIARCH void forward_row(const Scalar* const* rows, const Wide<Scalar>* weight, std::int64_t stride,
                                  std::int64_t width, std::int64_t count, bool silu, Scalar* __restrict out) {
  if (silu) {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto s = convolve<kWidth>(rows, weight, stride, width, i);
      out[i] = narrow<Scalar>(s * sigmoid(s).value);
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) out[i] = narrow<Scalar>(convolve<kWidth>(rows, weight, stride, width, i));
  }
}

// ds of one token.
template <int kWidth, typename Scalar>
SLUICE_MULTIARCH void backward_activation(const Scalar* __restrict grad, const Scalar* const* rows,
                                          const Wide<Scalar>* weight, std::int64_t stride, std::int64_t width,
                                          std::int64_t count, bool silu, Wide<Scalar>* __restrict grad_sum) {
  if (silu) {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto s = convolve<kWidth>(rows, weight, stride, width, i);
      const auto gate = sigmoid(s);
      grad_sum[i] = widen(grad[i]) * (gate.value + s * gate.value * gate.complement);
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) grad_sum[i] = widen(grad[i]);
  }
}

// One tap's share of dw.
template <typename Scalar>
SLUICE_MULTIARCH void add_weight_gradient(const Wide<Scalar>* __restrict grad_sum, const Scalar* __restrict row,
                                          std::int64_t count, Wide<Scalar>* __restrict grad_weight) {
  for (std::int64_t i = 0; i < count; ++i) grad_weight[i] += grad_sum[i] * widen(row[i]);
}

// du of one row; later[m] is ds of the token m places after it; `kept` the final state's gradient of this row, or null.
template <int kWidth, typename Scalar>
SLUICE_MULTIARCH void backward_row(const Wide<Scalar>* const* later, const Wide<Scalar>* weight, std::int64_t stride,
                                   std::int64_t width, std::int64_t count, const Scalar* kept,
                                   Scalar* __restrict grad_row) {
  const auto taps = taps_of<kWidth>(width);
  const auto sum = [=](std::int64_t i) {
    Wide<Scalar> total = 0;
    for (std::int64_t m = 0; m < taps; ++m) total += weight[(taps - 1 - m) * stride + i] * later[m][i];
    return total;
  };
  if (kept) {
    for (std::int64_t i = 0; i < count; ++i) grad_row[i] = narrow<Scalar>(sum(i) + widen(kept[i]));
  } else {
    for (std::int64_t i = 0; i < count; ++i) grad_row[i] = narrow<Scalar>(sum(i));
  }
}

// The rows of u of every sequence.
template <typename Scalar>
struct Inputs {
  const Scalar* tokens;  // [T, C]
  const Scalar* before;  // [N, W - 1, C]
  std::int64_t token_stride, sequence_stride, before_stride, width;
  Inputs(const Tensor& x, const Tensor& history)
      : tokens(x.const_data_ptr<Scalar>()),
        before(history.const_data_ptr<Scalar>()),
        token_stride(x.stride(0)),
        sequence_stride(history.stride(0)),
        before_stride(history.stride(1)),
        width(history.size(1) + 1) {}
  // Token t of sequence n, which begins at token `begin`; t may lie up to W - 1 before it.
  const Scalar* row(std::int64_t n, std::int64_t begin, std::int64_t t) const {
    return t >= begin ? tokens + t * token_stride
                      : before + n * sequence_stride + (t - begin + width - 1) * before_stride;
  }
  // The W rows that token t sees, from channel `first` on.
  void window(std::int64_t n, std::int64_t begin, std::int64_t t, std::int64_t first, const Scalar** rows) const {
    for (std::int64_t tap = 0; tap < width; ++tap) rows[tap] = row(n, begin, t - (width - 1) + tap) + first;
  }
};

// Calls body(n, begin, end) for the part of each sequence n that lies in tokens [first, last).
template <typename Body>
void for_each_piece(const std::vector<std::int64_t>& bounds, std::int64_t first, std::int64_t last, const Body& body) {
  auto n = std::upper_bound(bounds.begin(), bounds.end(), first) - bounds.begin() - 1;
  for (; bounds[n] < last; ++n) {
    const auto begin = std::max(first, bounds[n]), end = std::min(last, bounds[n + 1]);
    if (begin < end) body(n, begin, end);
  }
}

// Runs task(block, first channel, channels) over all blocks and chunks.
template <typename Task>
void for_each_tile(const RowBlocks& blocks, std::int64_t channels, const Task& task) {
  const auto chunks = (channels + kChannels - 1) / kChannels;
  const auto grain = rows_per_task(std::min(blocks.rows, blocks.size) * std::min(channels, kChannels));
  at::parallel_for(0, blocks.count * chunks, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto first = i % chunks * kChannels;
      task(i / chunks, first, std::min(kChannels, channels - first));
    }
  });
}

template <int kWidth, typename Scalar>
void forward_tokens(const Inputs<Scalar>& inputs, const Tensor& weight, const std::vector<std::int64_t>& bounds,
                    bool silu, Tensor& out) {
  const auto channels = out.size(1);
  const auto blocks = row_blocks(out.size(0), kTokens);
  const auto* weights = weight.const_data_ptr<Wide<Scalar>>();
  auto* outs = out.mutable_data_ptr<Scalar>();
  for_each_tile(blocks, channels, [&](std::int64_t block, std::int64_t first, std::int64_t count) {
    std::vector<const Scalar*> rows(inputs.width);
    for_each_piece(bounds, blocks.begin(block), blocks.end(block),
                   [&](std::int64_t n, std::int64_t begin, std::int64_t end) {
                     for (auto t = begin; t < end; ++t) {
                       inputs.window(n, bounds[n], t, first, rows.data());
                       forward_row<kWidth, Scalar>(rows.data(), weights + first, channels, inputs.width, count, silu,
                                                   outs + t * channels + first);
                     }
                   });
  });
}

// The last W - 1 rows of each sequence's u, [N, W - 1, C].
template <typename Scalar>
void keep_last(const Inputs<Scalar>& inputs, const std::vector<std::int64_t>& bounds, Tensor& state) {
  const auto sequences = state.size(0), kept = state.size(1), channels = state.size(2);
  auto* to = state.mutable_data_ptr<Scalar>();
  at::parallel_for(0, sequences, rows_per_task(kept * channels), [&](std::int64_t first, std::int64_t last) {
    for (auto n = first; n < last; ++n) {
      for (std::int64_t j = 0; j < kept; ++j) {
        std::copy_n(inputs.row(n, bounds[n], bounds[n + 1] - kept + j), channels, to + (n * kept + j) * channels);
      }
    }
  });
}

// Gradients where they are written; those of states are [N, W - 1, C].
template <typename Scalar>
struct Gradients {
  const Scalar* out;          // [T, C], given
  std::int64_t out_stride;    // between tokens
  const Scalar* final_state;  // given, or null
  Scalar* x;                  // [T, C]
  Scalar* initial_state;      // null where nobody asks for it
  Wide<Scalar>* weight;       // [blocks, W, C], added to
};

template <int kWidth, typename Scalar>
void backward_tokens(const Inputs<Scalar>& inputs, const Tensor& weight, const std::vector<std::int64_t>& bounds,
                     const RowBlocks& blocks, bool silu, const Gradients<Scalar>& grads) {
  const auto width = inputs.width, channels = weight.size(1);
  const auto* weights = weight.const_data_ptr<Wide<Scalar>>();
  for_each_tile(blocks, channels, [&](std::int64_t block, std::int64_t first, std::int64_t count) {
    std::vector<const Scalar*> rows(width);
    std::vector<Wide<Scalar>> grad_sums(width * count);  // ds of token t in row t % W
    std::vector<const Wide<Scalar>*> later(width);
    const auto grad_sum = [&](std::int64_t t) { return grad_sums.data() + t % width * count; };
    auto* grad_weight = grads.weight + block * width * channels + first;

    for_each_piece(bounds, blocks.begin(block), blocks.end(block), [&](auto n, auto begin, auto end) {
      const auto start = bounds[n], stop = bounds[n + 1];  // of the whole sequence
      std::fill(grad_sums.begin(), grad_sums.end(), Wide<Scalar>(0));
      for (auto t = begin; t < end + width - 1; ++t) {
        if (t < stop) {
          inputs.window(n, start, t, first, rows.data());
          backward_activation<kWidth, Scalar>(grads.out + t * grads.out_stride + first, rows.data(), weights + first,
                                              channels, width, count, silu, grad_sum(t));
        } else {
          std::fill_n(grad_sum(t), count, Wide<Scalar>(0));
        }
        if (t < end) {
          for (std::int64_t tap = 0; tap < width; ++tap) {
            add_weight_gradient<Scalar>(grad_sum(t), rows[tap], count, grad_weight + tap * channels);
          }
        }
        // The row whose last reader is token t.
        const auto p = t - (width - 1);
        Scalar* grad_row = nullptr;
        if (p >= begin) {
          grad_row = grads.x + p * channels + first;
        } else if (p < start && begin == start && grads.initial_state) {
          grad_row = grads.initial_state + (n * (width - 1) + p - start + width - 1) * channels + first;
        }
        if (!grad_row) continue;
        const auto place = p - (stop - (width - 1));  // in the final state
        const auto* kept = grads.final_state && place >= 0
                               ? grads.final_state + (n * (width - 1) + place) * channels + first
                               : nullptr;
        for (std::int64_t m = 0; m < width; ++m) later[m] = grad_sum(p + m + width);
        backward_row<kWidth, Scalar>(later.data(), weights + first, channels, width, count, kept, grad_row);
      }
    });
  });
}

// [N, C, W - 1] to [N, W - 1, C]; without a state, zeros that take one row.
Tensor rows_before(const std::optional<Tensor>& state, const Tensor& x, std::int64_t sequences, std::int64_t width) {
  if (state) return state->transpose(1, 2).contiguous();
  return at::zeros({1, 1, x.size(1)}, x.options()).expand({sequences, width - 1, x.size(1)});
}

// [C, 1, W] to [W, C] in the accumulation type.
Tensor taps_first(const Tensor& weight, at::ScalarType type) {
  return weight.squeeze(1).t().to(wide_type(type)).contiguous();
}

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                       const std::optional<Tensor>& initial_state, bool silu) {
  const auto bounds = checked_bounds("causal_conv", cu_seqlens, x.size(0));
  const auto sequences = cu_seqlens.size(0) - 1, channels = x.size(1), width = weight.size(2);
  const auto input = with_rows(x), history = rows_before(initial_state, x, sequences, width);
  const auto taps = taps_first(weight, x.scalar_type());
  auto out = at::empty(x.sizes(), x.options());
  auto state = at::empty({sequences, width - 1, channels}, x.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "causal_conv", [&] {
    const Inputs<scalar_t> inputs(input, history);
    const auto run = width == 4 ? forward_tokens<4, scalar_t> : forward_tokens<0, scalar_t>;
    run(inputs, taps, bounds, silu, out);
    keep_last(inputs, bounds, state);
  });
  return {out, state.transpose(1, 2).contiguous()};
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_out, const std::optional<Tensor>& grad_final_state,
                                                const Tensor& x, const Tensor& weight, const Tensor& cu_seqlens,
                                                const std::optional<Tensor>& initial_state, bool silu) {
  const auto bounds = checked_bounds("causal_conv_backward", cu_seqlens, x.size(0));
  const auto sequences = cu_seqlens.size(0) - 1, channels = x.size(1), width = weight.size(2);
  const auto input = with_rows(x), grad = with_rows(grad_out),
             history = rows_before(initial_state, x, sequences, width);
  const auto taps = taps_first(weight, x.scalar_type());
  const auto kept = grad_final_state ? grad_final_state->transpose(1, 2).contiguous() : Tensor();
  const auto blocks = row_blocks(x.size(0), kTokens);
  auto grad_x = at::empty(x.sizes(), x.options());
  // A sequence without tokens hands its state through; the others are overwritten.
  auto grad_before = kept.defined() ? kept.clone() : at::zeros({sequences, width - 1, channels}, x.options());
  auto partial = at::zeros({blocks.count, width * channels}, taps.options());
  AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, x.scalar_type(), "causal_conv_backward", [&] {
    const Inputs<scalar_t> inputs(input, history);
    const Gradients<scalar_t> grads{.out = grad.const_data_ptr<scalar_t>(),
                                    .out_stride = grad.stride(0),
                                    .final_state = kept.defined() ? kept.const_data_ptr<scalar_t>() : nullptr,
                                    .x = grad_x.mutable_data_ptr<scalar_t>(),
                                    .initial_state = initial_state ? grad_before.mutable_data_ptr<scalar_t>() : nullptr,
                                    .weight = partial.mutable_data_ptr<Wide<scalar_t>>()};
    const auto run = width == 4 ? backward_tokens<4, scalar_t> : backward_tokens<0, scalar_t>;
    run(inputs, taps, bounds, blocks, silu, grads);
  });
  const auto grad_weight = sum_in_order(partial).view({width, channels}).t().unsqueeze(1).contiguous();
  return {grad_x, grad_weight.to(weight.scalar_type()), grad_before.transpose(1, 2).contiguous()};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("causal_conv", forward_cpu);
  m.impl("causal_conv_backward", backward_cpu);
}

}  // namespace sluice
