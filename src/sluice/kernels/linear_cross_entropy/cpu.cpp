// SPDX-License-Identifier: Apache-2.0
// CPU path. The logits of the tokens that count are computed in tiles, [token tile, vocabulary tile] of at most
// kTileBytes, each one large product; the vocabulary runs outside, so that a tile of the weight, and its gradient, is
// met once. Forward keeps for each token the running maximum, sum of exponentials, argmax and target logit. Backward
// computes each tile again and turns it, in place, into the gradient of the logits,
//   G = g (P - onehot(target)) - e P (log P + entropy)        dH += G W        dW = sum over token tiles of G^T H
// with log P = X - lse and g, e the gradients of nll and entropy.
// dW is computed as (H^T G)^T: H is transposed once, the tiles never.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "sluice/core/error.h"
#include "sluice/kernels/common/exp.h"
#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/matmul.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {
namespace {

constexpr std::int64_t kIgnored = -100, kElsewhere = -1;
constexpr std::int64_t kTileBytes = 32 << 20;  // of logits in the accumulation type
constexpr std::int64_t kTokens = 2048;         // of a tile, so that its vocabulary is 4096 wide in float32

struct Tiles {
  std::int64_t tokens, vocabulary;
};

// The gradient of the weight's tile, [vocabulary tile, D], keeps to kTileBytes too, however few the tokens; and no tile
// is wider than 32768 ids in float32, because products along it pack their operands at full depth.
Tiles tiles_of(std::int64_t tokens, const Tensor& weight, std::int64_t item_bytes) {
  const auto vocabulary = weight.size(0), tile_tokens = std::clamp<std::int64_t>(tokens, 1, kTokens);
  const auto longest = std::max<std::int64_t>({tile_tokens, weight.size(1), 256});
  const auto width = std::max<std::int64_t>(64, kTileBytes / item_bytes / longest / 64 * 64);
  return {.tokens = tile_tokens, .vocabulary = std::min(width, vocabulary)};
}

// The tokens whose targets count; every target is checked.
struct Counted {
  Tensor rows;     // [C] their positions, or undefined when all count
  Tensor hidden;   // [C, D] dense
  Tensor targets;  // [C]
  std::int64_t count;
};

Counted counted_tokens(const Tensor& hidden, const Tensor& targets, std::int64_t vocabulary) {
  const auto dense = targets.contiguous();
  const auto* ids = dense.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> rows;
  for (std::int64_t t = 0; t < dense.size(0); ++t) {
    if (ids[t] == kIgnored) continue;
    SLUICE_CHECK(
        ids[t] == kElsewhere || (ids[t] >= 0 && ids[t] < vocabulary),
        "linear_cross_entropy: the target at position {} is {}; it must be an id below the vocabulary size, {}, "
        "or -100 to be ignored, or -1 for one elsewhere",
        t, ids[t], vocabulary);
    rows.push_back(t);
  }
  const auto count = static_cast<std::int64_t>(rows.size());
  if (count == dense.size(0)) return {.rows = {}, .hidden = hidden.contiguous(), .targets = dense, .count = count};
  const auto index = at::tensor(rows, dense.options());
  return {
      .rows = index, .hidden = hidden.index_select(0, index), .targets = dense.index_select(0, index), .count = count};
}

// x [C, ..] back to [T, ..], `fill` where ignored.
Tensor scatter(const Tensor& x, const Counted& counted, std::int64_t tokens, double fill) {
  if (!counted.rows.defined()) return x;
  auto sizes = x.sizes().vec();
  sizes[0] = tokens;
  return at::full(sizes, fill, x.options()).index_copy_(0, counted.rows, x);
}

// What forward knows of one token's logits so far.
template <typename Real>
struct Running {
  Real max = -std::numeric_limits<Real>::infinity(), target = 0;
  Real sum = 0, weighted = 0;  // of exp(x - max), and of exp(x - max) (x - max) where the entropy is asked for
  std::int64_t argmax = 0;

  void raise(Real larger) {
    if (sum > 0) {
      const Real below = max - larger, weight = exp_nonpositive(below);
      weighted = weight * (weighted + below * sum);
      sum *= weight;
    }
    max = larger;
  }
};

// What multiplies the logits, and whether their entropy is asked for.
template <typename Real>
struct Softmax {
  Real scale;
  bool entropy;
};

// Rows [begin, end) of a tile whose first column is id `first_id`.
template <typename Real>
SLUICE_MULTIARCH void take_logits(const Real* logits, std::int64_t begin, std::int64_t end, std::int64_t stride,
                                  std::int64_t width, std::int64_t first_id, const std::int64_t* targets,
                                  const Softmax<Real>& softmax, Running<Real>* running) {
  const Real scale = softmax.scale;
  for (auto t = begin; t < end; ++t) {
    const Real* x = logits + t * stride;
    Running<Real>& row = running[t];
    const Real largest = lane_max(x, width);
    if (scale * largest > row.max) {
      row.raise(scale * largest);
      row.argmax = first_id + (std::find(x, x + width, largest) - x);
    }
    // A fused product may put it a rounding above 0, where exp_nonpositive is as good.
    const auto below = [x, scale, max = row.max](std::int64_t i) { return scale * x[i] - max; };
    row.sum += lane_sum<Real>(width, [&below](std::int64_t i) { return exp_nonpositive(below(i)); });
    if (softmax.entropy) {
      row.weighted += lane_sum<Real>(width, [&below](std::int64_t i) { return exp_nonpositive(below(i)) * below(i); });
    }
    const auto target = targets[t] - first_id;
    if (target >= 0 && target < width) row.target = scale * x[target];
  }
}

// Of each counted token: what turns its logits into their gradients.
template <typename Real>
struct Descent {
  const Real *lse, *grad_nll;
  const Real *entropy, *grad_entropy;  // both null: no gradient of the entropy
  Real scale;

  Descent from(std::int64_t token) const {
    const auto later = [token](const Real* x) { return x == nullptr ? x : x + token; };
    return {lse + token, grad_nll + token, later(entropy), later(grad_entropy), scale};
  }
};

// The same rows become gradients of the logits, in the operands' dtype.
template <typename Scalar>
SLUICE_MULTIARCH void logits_to_gradients(const Wide<Scalar>* logits, std::int64_t begin, std::int64_t end,
                                          std::int64_t stride, std::int64_t width, std::int64_t first_id,
                                          const std::int64_t* targets, const Descent<Wide<Scalar>>& descent,
                                          Scalar* gradients) {
  using Real = Wide<Scalar>;
  const Real scale = descent.scale;
  for (auto t = begin; t < end; ++t) {
    const Real* x = logits + t * stride;
    Scalar* to = gradients + t * stride;
    const Real own_lse = descent.lse[t], grad = scale * descent.grad_nll[t];
    const auto target = targets[t] - first_id;
    const bool inside = target >= 0 && target < width;
    const Real target_logit = inside ? x[target] : Real(0);
    const auto log_probability = [own_lse, scale](Real logit) {
      const Real below = scale * logit - own_lse;
      return below > 0 ? Real(0) : below;  // rounding may put it above
    };
    if (descent.grad_entropy == nullptr) {
      for (std::int64_t i = 0; i < width; ++i) {
        to[i] = narrow<Scalar>(grad * exp_nonpositive(log_probability(x[i])));
      }
      if (inside) to[target] = narrow<Scalar>(grad * (exp_nonpositive(log_probability(target_logit)) - 1));
    } else {
      const Real entropy = descent.entropy[t], grad_entropy = scale * descent.grad_entropy[t];
      const auto gradient = [log_probability, entropy, grad, grad_entropy](Real logit) {
        const Real log_p = log_probability(logit);
        return (grad - grad_entropy * (log_p + entropy)) * exp_nonpositive(log_p);
      };
      for (std::int64_t i = 0; i < width; ++i) to[i] = narrow<Scalar>(gradient(x[i]));
      if (inside) to[target] = narrow<Scalar>(gradient(target_logit) - grad);
    }
  }
}

template <typename Real>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_counted(const Counted& counted, const Tensor& weight,
                                                           const Softmax<Real>& softmax) {
  const auto wide = weight.options().dtype(c10::CppTypeToScalarType<Real>::value);
  const auto tiles = tiles_of(counted.count, weight, sizeof(Real));
  const Tensor tile = at::empty({tiles.tokens, tiles.vocabulary}, wide);
  std::vector<Running<Real>> running(counted.count);
  const auto* targets = counted.targets.const_data_ptr<std::int64_t>();
  for (std::int64_t id = 0; id < weight.size(0) && counted.count > 0; id += tiles.vocabulary) {
    const auto width = std::min(tiles.vocabulary, weight.size(0) - id);
    const auto own_weight = weight.narrow(0, id, width).t();
    for (std::int64_t token = 0; token < counted.count; token += tiles.tokens) {
      const auto tokens = std::min(tiles.tokens, counted.count - token);
      const auto logits = tile.narrow(0, 0, tokens).narrow(1, 0, width);
      matmul_into(logits, counted.hidden.narrow(0, token, tokens), own_weight, false);
      at::parallel_for(0, tokens, rows_per_task(width), [&](std::int64_t begin, std::int64_t end) {
        take_logits(tile.const_data_ptr<Real>(), begin, end, tile.stride(0), width, id, targets + token, softmax,
                    running.data() + token);
      });
    }
  }
  Tensor nll = at::empty({counted.count}, wide), lse = at::empty({counted.count}, wide),
         entropy = at::empty({softmax.entropy ? counted.count : 0}, wide),
         predicted = at::empty({counted.count}, counted.targets.options());
  for (std::int64_t t = 0; t < counted.count; ++t) {
    const auto log_sum = std::log(running[t].sum);
    lse.mutable_data_ptr<Real>()[t] = running[t].max + log_sum;
    nll.mutable_data_ptr<Real>()[t] = log_sum + (running[t].max - running[t].target);
    predicted.mutable_data_ptr<std::int64_t>()[t] = running[t].argmax;
    if (softmax.entropy) entropy.mutable_data_ptr<Real>()[t] = log_sum - running[t].weighted / running[t].sum;
  }
  return {nll, predicted, lse, entropy};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_cpu(const Tensor& hidden, const Tensor& weight,
                                                       const Tensor& targets, double logit_scale, bool entropy) {
  const auto counted = counted_tokens(hidden, targets, weight.size(0));
  const auto dense_weight = weight.contiguous();
  const auto [nll, predicted, lse, entropies] =
      hidden.scalar_type() == kDouble
          ? forward_counted<double>(counted, dense_weight, {.scale = logit_scale, .entropy = entropy})
          : forward_counted<float>(counted, dense_weight,
                                   {.scale = static_cast<float>(logit_scale), .entropy = entropy});
  const auto tokens = hidden.size(0);
  return {scatter(nll, counted, tokens, 0), scatter(predicted, counted, tokens, kIgnored),
          scatter(lse, counted, tokens, 0), entropy ? scatter(entropies, counted, tokens, 0) : entropies};
}

template <typename Scalar>
std::tuple<Tensor, Tensor> backward_counted(const Counted& counted, const Tensor& weight,
                                            const Descent<Wide<Scalar>>& descent, bool weight_gradient) {
  using Real = Wide<Scalar>;
  const auto wide = weight.options().dtype(c10::CppTypeToScalarType<Real>::value);
  const auto size = weight.size(1);
  const auto tiles = tiles_of(counted.count, weight, sizeof(Real));
  const Tensor tile = at::empty({tiles.tokens, tiles.vocabulary}, wide);
  const Tensor gradients = weight.scalar_type() == wide.dtype() ? tile : at::empty_like(tile, weight.options());
  const Tensor grad_weight_t = at::empty({weight_gradient ? size : 0, tiles.vocabulary}, wide);
  const Tensor hidden_t = weight_gradient ? counted.hidden.t().contiguous() : Tensor();
  const Tensor grad_hidden = at::empty({counted.count, size}, wide);
  const Tensor grad_weight = weight_gradient ? at::empty_like(weight) : at::empty({0}, weight.options());
  const auto* targets = counted.targets.const_data_ptr<std::int64_t>();
  for (std::int64_t id = 0; id < weight.size(0); id += tiles.vocabulary) {
    const auto width = std::min(tiles.vocabulary, weight.size(0) - id);
    const auto own_weight = weight.narrow(0, id, width);
    for (std::int64_t token = 0; token < counted.count; token += tiles.tokens) {
      const auto tokens = std::min(tiles.tokens, counted.count - token);
      const auto part = [&](const Tensor& x) { return x.narrow(0, 0, tokens).narrow(1, 0, width); };
      matmul_into(part(tile), counted.hidden.narrow(0, token, tokens), own_weight.t(), false);
      at::parallel_for(0, tokens, rows_per_task(width), [&](std::int64_t begin, std::int64_t end) {
        logits_to_gradients<Scalar>(tile.const_data_ptr<Real>(), begin, end, tile.stride(0), width, id, targets + token,
                                    descent.from(token), gradients.mutable_data_ptr<Scalar>());
      });
      matmul_into(grad_hidden.narrow(0, token, tokens), part(gradients), own_weight, id > 0);
      if (!weight_gradient) continue;
      matmul_into(grad_weight_t.narrow(1, 0, width), hidden_t.narrow(1, token, tokens), part(gradients), token > 0);
    }
    if (!weight_gradient) continue;
    grad_weight.narrow(0, id, width).copy_(grad_weight_t.narrow(1, 0, width).to(weight.scalar_type()).t());
  }
  return {grad_hidden.to(weight.scalar_type()), grad_weight};
}

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad_nll, const Tensor& hidden, const Tensor& weight,
                                        const Tensor& targets, const Tensor& lse, double logit_scale,
                                        const std::optional<Tensor>& grad_entropy, const std::optional<Tensor>& entropy,
                                        bool weight_gradient) {
  const auto counted = counted_tokens(hidden, targets, weight.size(0));
  if (counted.count == 0) {
    return {at::zeros_like(hidden), weight_gradient ? at::zeros_like(weight) : at::empty({0}, weight.options())};
  }
  const auto own = [&](const Tensor& x) {
    return (counted.rows.defined() ? x.index_select(0, counted.rows) : x).contiguous();
  };
  const auto own_grad = own(grad_nll), own_lse = own(lse), dense_weight = weight.contiguous();
  const auto own_entropy = entropy ? own(*entropy) : Tensor(),
             own_d_entropy = grad_entropy ? own(*grad_entropy) : Tensor();
  return AT_DISPATCH_FLOATING_TYPES_AND(kBFloat16, weight.scalar_type(), "linear_cross_entropy_backward", [&] {
    using Real = Wide<scalar_t>;
    const auto data = [](const Tensor& x) { return x.defined() ? x.const_data_ptr<Real>() : nullptr; };
    auto [grad_hidden, grad_weight] = backward_counted<scalar_t>(counted, dense_weight,
                                                                 {.lse = data(own_lse),
                                                                  .grad_nll = data(own_grad),
                                                                  .entropy = data(own_entropy),
                                                                  .grad_entropy = data(own_d_entropy),
                                                                  .scale = static_cast<Real>(logit_scale)},
                                                                 weight_gradient);
    return std::tuple(scatter(grad_hidden, counted, hidden.size(0), 0), grad_weight);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> loss_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                                    const Tensor& loss_weight, bool hidden_gradient,
                                                    bool weight_gradient) {
  const auto [nll, predicted, lse, entropy] =
      forward_cpu(hidden, weight, targets, /*logit_scale=*/1, /*entropy=*/false);
  const auto loss = (nll * loss_weight).sum();
  if (!hidden_gradient && !weight_gradient) {
    return {loss, predicted, at::empty({0}, hidden.options()), at::empty({0}, weight.options())};
  }
  const auto [grad_hidden, grad_weight] = backward_cpu(loss_weight, hidden, weight, targets, lse, /*logit_scale=*/1,
                                                       /*grad_entropy=*/{}, /*entropy=*/{}, weight_gradient);
  return {loss, predicted, grad_hidden, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("linear_cross_entropy", forward_cpu);
  m.impl("linear_cross_entropy_backward", backward_cpu);
  m.impl("linear_cross_entropy.loss", loss_cpu);
}

}  // namespace sluice
