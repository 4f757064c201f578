// SPDX-License-Identifier: Apache-2.0
// On CUDA tensors: the tokens go through in tiles, all ids at once. A tile is one matrix product with float32 logits
// and one pass over them. For gradients another pass turns them into G, their gradients, and two products follow,
//   dH = G W        dW = sum over tiles of G^T H
// with dW summed in float32. Backward computes the logits again; the loss finds them in place. Nothing waits for the
// device: ignored tokens stay in the tiles.
#include <algorithm>

#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/linear_cross_entropy/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "linear_cross_entropy";
constexpr std::int64_t kTileBytes = std::int64_t{4} << 30;  // of logits: each tile reads and writes the sum of dW
constexpr std::int64_t kMostTokens = 1 << 14;               // of a tile

std::int64_t tile_tokens(std::int64_t tokens, std::int64_t vocabulary) {
  const auto fitting = kTileBytes / static_cast<std::int64_t>(sizeof(float)) / vocabulary;
  return std::clamp<std::int64_t>(fitting, 1, std::clamp<std::int64_t>(tokens, 1, kMostTokens));
}

// out = a b in float32, or out += a b. Operands float32 or bfloat16.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  auto& to = const_cast<Tensor&>(out);
  if (a.scalar_type() == kFloat) {
    if (accumulate) at::addmm_out(to, to, a, b);
    else at::mm_out(to, a, b);
  } else {
    if (accumulate) at::addmm_out(to, to, a, b, kFloat);
    else at::mm_out(to, a, b, kFloat);
  }
}

// The passes over tiles of tokens that the three entries combine.
class Tiles {
 public:
  Tiles(const Tensor& hidden, const Tensor& weight, const Tensor& targets, double logit_scale)
      : hidden_(hidden),
        weight_(weight),
        targets_(targets.contiguous()),
        vocabulary_(weight.size(0)),
        scale_(static_cast<float>(logit_scale)),
        tokens_(tile_tokens(hidden.size(0), vocabulary_)),
        wide_(hidden.options().dtype(kFloat)),
        logits_(at::empty({tokens_, vocabulary_}, wide_)),
        nll_(at::empty({hidden.size(0)}, wide_)),
        lse_(at::empty_like(nll_)),
        entropy_(at::empty({0}, wide_)),
        predicted_(at::empty(targets_.sizes(), targets_.options())) {
    is_bfloat16(kOp, "hidden", hidden);
    check_device(kOp, "weight", weight, hidden);
    check_device(kOp, "targets", targets, hidden);
  }

  // Calls `function(first token, count)` with the tile's logits in place.
  template <typename Function>
  void for_each(const Function& function) {
    for (std::int64_t t = 0; t < hidden_.size(0); t += tokens_) {
      const auto own = std::min(tokens_, hidden_.size(0) - t);
      multiply(logits_.narrow(0, 0, own), hidden_.narrow(0, t, own), weight_.t(), false);
      function(t, own);
    }
  }

  void ask_for_entropy() { entropy_ = at::empty_like(nll_); }

  void summarize(std::int64_t t, std::int64_t own) {
    check_launch(kOp,
                 launch_logits({.logits = logits_.const_data_ptr<float>(),
                                .targets = targets_.const_data_ptr<std::int64_t>() + t,
                                .tokens = static_cast<std::int32_t>(own),
                                .vocabulary = vocabulary_,
                                .scale = scale_,
                                .nll = nll_.mutable_data_ptr<float>() + t,
                                .predicted = predicted_.mutable_data_ptr<std::int64_t>() + t,
                                .lse = lse_.mutable_data_ptr<float>() + t,
                                .entropy = entropy_.numel() > 0 ? entropy_.mutable_data_ptr<float>() + t : nullptr},
                               c10::cuda::getCurrentCUDAStream()));
  }

  void start_gradients(bool of_weight) {
    gradients_ = hidden_.scalar_type() == kFloat ? logits_ : at::empty(logits_.sizes(), hidden_.options());
    grad_hidden_ = at::empty(hidden_.sizes(), hidden_.options());
    if (!of_weight) return;
    grad_weight_ = hidden_.size(0) == 0 ? at::zeros(weight_.sizes(), wide_) : at::empty(weight_.sizes(), wide_);
  }

  // Of the tile whose logits are in place; all [T] dense, the last two may be undefined together.
  void differentiate(std::int64_t t, std::int64_t own, const Tensor& lse, const Tensor& grad_nll,
                     const Tensor& entropy = {}, const Tensor& grad_entropy = {}) {
    const auto from = [t](const Tensor& x) { return x.defined() ? x.const_data_ptr<float>() + t : nullptr; };
    check_launch(kOp, launch_logit_gradients({.logits = logits_.const_data_ptr<float>(),
                                              .targets = targets_.const_data_ptr<std::int64_t>() + t,
                                              .lse = from(lse),
                                              .grad_nll = from(grad_nll),
                                              .entropy = from(entropy),
                                              .grad_entropy = from(grad_entropy),
                                              .tokens = static_cast<std::int32_t>(own),
                                              .vocabulary = vocabulary_,
                                              .scale = scale_,
                                              .bfloat16 = hidden_.scalar_type() == kBFloat16,
                                              .gradients = gradients_.mutable_data_ptr()},
                                             c10::cuda::getCurrentCUDAStream()));
    const auto own_gradients = gradients_.narrow(0, 0, own);
    auto rows = grad_hidden_.narrow(0, t, own);
    at::mm_out(rows, own_gradients, weight_);
    if (grad_weight_.defined()) multiply(grad_weight_, own_gradients.t(), hidden_.narrow(0, t, own), t > 0);
  }

  const Tensor& nll() const { return nll_; }
  const Tensor& lse() const { return lse_; }
  const Tensor& predicted() const { return predicted_; }
  const Tensor& entropy() const { return entropy_; }
  const Tensor& grad_hidden() const { return grad_hidden_; }
  Tensor grad_weight() const {
    return grad_weight_.defined() ? grad_weight_.to(weight_.scalar_type()) : at::empty({0}, weight_.options());
  }

 private:
  Tensor hidden_, weight_, targets_;
  std::int64_t vocabulary_;
  float scale_;
  std::int64_t tokens_;  // of a tile
  at::TensorOptions wide_;
  Tensor logits_;                           // [tile, V] float32
  Tensor nll_, lse_, entropy_, predicted_;  // [T]; entropy_ empty: nobody asks
  Tensor gradients_;                        // [tile, V], dtype of hidden
  Tensor grad_hidden_, grad_weight_;        // the second undefined: nobody asks
};

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_cuda(const Tensor& hidden, const Tensor& weight,
                                                        const Tensor& targets, double logit_scale, bool entropy) {
  const c10::cuda::CUDAGuard device(hidden.device());
  const at::AutoDispatchBelowAutograd below;
  Tiles tiles(hidden, weight, targets, logit_scale);
  if (entropy) tiles.ask_for_entropy();
  tiles.for_each([&](std::int64_t t, std::int64_t own) { tiles.summarize(t, own); });
  return {tiles.nll(), tiles.predicted(), tiles.lse(), tiles.entropy()};
}

std::tuple<Tensor, Tensor> backward_cuda(const Tensor& grad_nll, const Tensor& hidden, const Tensor& weight,
                                         const Tensor& targets, const Tensor& lse, double logit_scale,
                                         const std::optional<Tensor>& grad_entropy,
                                         const std::optional<Tensor>& entropy, bool weight_gradient) {
  const c10::cuda::CUDAGuard device(hidden.device());
  const at::AutoDispatchBelowAutograd below;
  const auto grad = grad_nll.contiguous(), own_lse = lse.contiguous();
  const auto own_entropy = entropy ? entropy->contiguous() : Tensor(),
             own_d_entropy = grad_entropy ? grad_entropy->contiguous() : Tensor();
  Tiles tiles(hidden, weight, targets, logit_scale);
  tiles.start_gradients(weight_gradient);
  tiles.for_each([&](std::int64_t t, std::int64_t own) {
    tiles.differentiate(t, own, own_lse, grad, own_entropy, own_d_entropy);
  });
  return {tiles.grad_hidden(), tiles.grad_weight()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> loss_cuda(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                                     const Tensor& loss_weight, bool hidden_gradient,
                                                     bool weight_gradient) {
  const c10::cuda::CUDAGuard device(hidden.device());
  const at::AutoDispatchBelowAutograd below;
  const auto grad = loss_weight.contiguous();
  const bool gradients = hidden_gradient || weight_gradient;
  Tiles tiles(hidden, weight, targets, /*logit_scale=*/1);
  if (gradients) tiles.start_gradients(weight_gradient);
  tiles.for_each([&](std::int64_t t, std::int64_t own) {
    tiles.summarize(t, own);
    if (gradients) tiles.differentiate(t, own, tiles.lse(), grad);
  });
  const auto loss = (tiles.nll() * loss_weight).sum();
  if (!gradients) return {loss, tiles.predicted(), at::empty({0}, hidden.options()), at::empty({0}, weight.options())};
  return {loss, tiles.predicted(), tiles.grad_hidden(), tiles.grad_weight()};
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) {
  m.impl("linear_cross_entropy", forward_cuda);
  m.impl("linear_cross_entropy_backward", backward_cuda);
  m.impl("linear_cross_entropy.loss", loss_cuda);
}

}  // namespace
}  // namespace sluice
