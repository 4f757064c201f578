// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/adamw.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "sluice/core/error.h"
#include "sluice/formats/safetensors.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

struct Update {
  float lr, decay, beta1, beta2, eps, gradient_scale, correction1, sqrt_correction2;
};

SLUICE_MULTIARCH void update_range(const Update& u, std::int64_t first, std::int64_t last,
                                   const float* __restrict gradient, float* __restrict master,
                                   float* __restrict exp_avg, float* __restrict exp_avg_sq) {
  const float step_size = u.lr / u.correction1, kept = 1 - u.lr * u.decay;
  for (auto i = first; i < last; ++i) {
    const float g = gradient[i] * u.gradient_scale;
    exp_avg[i] = u.beta1 * exp_avg[i] + (1 - u.beta1) * g;
    exp_avg_sq[i] = u.beta2 * exp_avg_sq[i] + (1 - u.beta2) * g * g;
    const float denominator = std::sqrt(exp_avg_sq[i]) / u.sqrt_correction2 + u.eps;
    master[i] = kept * master[i] - step_size * exp_avg[i] / denominator;
  }
}

// Blocks of fixed size summed in order: the same bits whatever the number of threads.
double sum_of_squares(const Tensor& x) {
  constexpr std::int64_t kBlock = 1 << 16;
  const auto blocks = (x.numel() + kBlock - 1) / kBlock;
  std::vector<double> partial(static_cast<std::size_t>(blocks));
  const auto* data = x.const_data_ptr<float>();
  at::parallel_for(0, blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (auto block = first; block < last; ++block) {
      double sum = 0;
      const auto end = std::min(x.numel(), (block + 1) * kBlock);
      for (auto i = block * kBlock; i < end; ++i) sum += static_cast<double>(data[i]) * data[i];
      partial[static_cast<std::size_t>(block)] = sum;
    }
  });
  double total = 0;
  for (const auto sum : partial) total += sum;
  return total;
}

}  // namespace

GradientSum::GradientSum(const std::vector<Parameter*>& parameters, const Mesh& mesh)
    : shards_(parameters, mesh), sums_(parameters.size()) {}

void GradientSum::take() {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    auto& gradient = shards_.parameter(i).value.mutable_grad();
    if (!gradient.defined()) continue;
    if (sums_[i].defined()) {
      sums_[i].add_(gradient);
    } else {
      sums_[i] = gradient.to(kFloat).contiguous();
    }
    gradient.reset();
  }
}

void GradientSum::reduce() { shards_.reduce(sums_); }

Tensor GradientSum::norm() const {
  const auto device = sums_.empty() ? at::Device(at::kCPU) : shards_.parameter(0).value.device();
  std::vector<Tensor> defined;
  for (const auto& sum : sums_) {
    if (sum.defined() && sum.numel() > 0) defined.push_back(sum);
  }
  auto squares = at::zeros({}, at::TensorOptions().dtype(kDouble).device(device));
  if (!device.is_cpu() && !defined.empty()) {
    squares = at::stack(at::_foreach_norm(defined, 2, kDouble)).square().sum();
  } else {
    for (const auto& sum : defined) squares += sum_of_squares(sum);
  }
  return all_reduce_sum(squares, mesh().world()).sqrt();
}

std::string GradientSum::first_not_finite() const {
  auto first = std::ssize(sums_);
  for (std::int64_t i = first - 1; i >= 0; --i) {
    const auto& sum = sums_[static_cast<std::size_t>(i)];
    if (sum.defined() && !sum.isfinite().all().item<bool>()) first = i;
  }
  for (const auto& its : all_gather_numbers({first}, mesh().world())) first = std::min(first, its[0]);
  return first < std::ssize(sums_) ? shards_.parameter(static_cast<std::size_t>(first)).name : "";
}

void GradientSum::clear() {
  for (auto& sum : sums_) sum.reset();
}

AdamW::AdamW(const std::vector<Parameter*>& parameters, const AdamWSettings& settings, const Mesh& mesh)
    : shards_(parameters, mesh), settings_(settings) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto own = shards_.own_rows(i, parameters[i]->value.detach());
    const auto master = own.to(kFloat);  // shares memory where the parameter is float32
    const auto ratio = settings.lr_ratios.find(parameters[i]->name);
    slots_.push_back({parameters[i], master, at::zeros_like(master), at::zeros_like(master),
                      ratio == settings.lr_ratios.end() ? 1 : ratio->second});
  }
}

void AdamW::step(const GradientSum& gradients, double lr, const Tensor& gradient_scale) {
  const at::NoGradGuard no_grad;
  ++steps_;
  if (gradient_scale.is_cuda()) step_on_gpu(gradients, lr, gradient_scale);
  else if (const auto scale = gradient_scale.item<double>(); !std::isnan(scale)) step_on_cpu(gradients, lr, scale);
  publish();
}

void AdamW::step_on_cpu(const GradientSum& gradients, double lr, double gradient_scale) {
  const auto count = static_cast<double>(steps_);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    auto& slot = slots_[i];
    const auto gradient = gradients.of(i).defined() ? gradients.of(i) : at::zeros_like(slot.master);
    const Update update{.lr = static_cast<float>(lr * slot.lr_ratio),
                        .decay = static_cast<float>(slot.parameter->decay ? settings_.weight_decay : 0),
                        .beta1 = static_cast<float>(settings_.beta1),
                        .beta2 = static_cast<float>(settings_.beta2),
                        .eps = static_cast<float>(settings_.eps),
                        .gradient_scale = static_cast<float>(gradient_scale),
                        .correction1 = static_cast<float>(1 - std::pow(settings_.beta1, count)),
                        .sqrt_correction2 = static_cast<float>(std::sqrt(1 - std::pow(settings_.beta2, count)))};
    const auto* from = gradient.const_data_ptr<float>();
    auto *master = slot.master.mutable_data_ptr<float>(), *first = slot.exp_avg.mutable_data_ptr<float>(),
         *second = slot.exp_avg_sq.mutable_data_ptr<float>();
    at::parallel_for(0, slot.master.numel(), 1 << 14, [&](std::int64_t begin, std::int64_t end) {
      update_range(update, begin, end, from, master, first, second);
    });
  }
}

// The same formula in libtorch's kernel over many tensors at once: a call for the parameters that decay and one for the
// rest, of each learning rate. It divides gradients by its `grad_scale`, and leaves all as it is where `found_inf`
// is 1.
void AdamW::step_on_gpu(const GradientSum& gradients, double lr, const Tensor& gradient_scale) {
  const auto divisor = gradient_scale.reciprocal().to(kFloat), skip = gradient_scale.isnan().to(kFloat);
  const auto step = at::full({}, static_cast<double>(steps_), divisor.options());
  std::map<std::pair<double, double>, std::vector<std::size_t>> groups;  // by learning rate and decay
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& slot = slots_[i];
    if (slot.master.numel() == 0) continue;
    groups[{lr * slot.lr_ratio, slot.parameter->decay ? settings_.weight_decay : 0}].push_back(i);
  }
  for (const auto& group : groups) {
    const auto& [own_lr, decay] = group.first;
    std::vector<Tensor> masters, sums, exp_avgs, exp_avg_sqs;
    for (const auto i : group.second) {
      const auto& slot = slots_[i];
      masters.push_back(slot.master);
      sums.push_back(gradients.of(i).defined() ? rows_view(gradients.of(i)) : at::zeros_like(slot.master));
      exp_avgs.push_back(slot.exp_avg);
      exp_avg_sqs.push_back(slot.exp_avg_sq);
    }
    at::_fused_adamw_(masters, sums, exp_avgs, exp_avg_sqs, {}, std::vector<Tensor>(masters.size(), step), own_lr,
                      settings_.beta1, settings_.beta2, decay, settings_.eps, /*amsgrad=*/false, /*maximize=*/false,
                      divisor, skip);
  }
}

OptimizerState AdamW::state() const {
  OptimizerState state;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto& slot = slots_[i];
    const auto add = [&](const char* kind, const Tensor& rows) {
      TensorParts tensor{.name = slot.parameter->name, .shape = slot.parameter->shape, .parts = {}};
      std::int64_t row = 0;
      for (const auto& box : shards_.own_boxes(i)) {
        tensor.parts.push_back({box, rows.narrow(0, row, box.rows)});
        row += box.rows;
      }
      state[kind].push_back(std::move(tensor));
    };
    add("master", slot.master);
    add("exp_avg", slot.exp_avg);
    add("exp_avg_sq", slot.exp_avg_sq);
  }
  return state;
}

void AdamW::restore(const OptimizerState& state, std::int64_t steps_done) {
  for (const auto& [kind, ours] : this->state()) {
    const auto found = state.find(kind);
    if (found == state.end()) fail_data("checkpoint: the optimizer's {} is missing", kind);
    std::map<std::string, const TensorParts*> saved;
    for (const auto& tensor : found->second) saved[tensor.name] = &tensor;
    for (const auto& [name, shape, parts] : ours) {
      const auto entry = saved.find(name);
      if (entry == saved.end() || entry->second->shape != shape) {
        fail_data("checkpoint: {} of {}: expected {}, found {}. The model is not the one that the run began with.",
                  kind, name, shape_text(shape), entry == saved.end() ? "nothing" : shape_text(entry->second->shape));
      }
      for (const auto& part : parts) copy_boxes(*entry->second, {part.box}, part.values);
      saved.erase(entry);
    }
    if (!saved.empty()) {
      fail_data("checkpoint: {} of {}, and {} more, which this model does not have", kind, saved.begin()->first,
                saved.size() - 1);
    }
  }
  steps_ = steps_done;
  publish();
}

void AdamW::publish() {
  std::vector<Tensor> masters;
  for (const auto& slot : slots_) masters.push_back(slot.master);
  shards_.publish(masters);
}

}  // namespace sluice
