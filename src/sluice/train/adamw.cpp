// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/adamw.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "sluice/core/error.h"
#include "sluice/formats/safetensors.h"
#include "sluice/kernels/common/multiarch.h"

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

// Waits for the copy, so that the host may read the place at once.
void take_back(const Tensor& value, const Tensor& place) {
  if (!value.is_alias_of(place)) place.copy_(value);
}

}  // namespace

// What a step changes, on the device.
struct AdamW::Work {
  double lr, decay;
  Tensor gradient;  // [rows, columns]; undefined: zero
  States states;
};

AdamW::States AdamW::States::rows(std::int64_t first, std::int64_t count) const {
  return {master.narrow(0, first, count), exp_avg.narrow(0, first, count), exp_avg_sq.narrow(0, first, count)};
}

AdamW::States AdamW::States::to(at::Device device) const {
  const auto there = [&](const Tensor& x) { return x.to(device, /*non_blocking=*/true); };
  return {there(master), there(exp_avg), there(exp_avg_sq)};
}

AdamW::AdamW(const std::vector<Parameter*>& parameters, const AdamWSettings& settings, const Mesh& mesh,
             const OffloadSettings& offload)
    : shards_(parameters, mesh), settings_(settings), places_([&] {
        std::int64_t elements = 0;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          const auto states = parameters[i]->value.scalar_type() == kFloat ? 2 : 3;
          elements += states * shards_.own_rows(i, parameters[i]->value.detach()).numel();
        }
        const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters[0]->value.device();
        return StatePlaces(offload, device, elements, 3 * std::ssize(parameters));
      }()) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto own = shards_.own_rows(i, parameters[i]->value.detach());
    const auto place = [&] { return places_.next(own.size(0), own.size(1)); };
    const auto ratio = settings.lr_ratios.find(parameters[i]->name);
    const auto master = own.scalar_type() == kFloat ? own : place().copy_(own);
    slots_.push_back({.parameter = parameters[i],
                      .states = {.master = master, .exp_avg = place(), .exp_avg_sq = place()},
                      .lr_ratio = ratio == settings.lr_ratios.end() ? 1 : ratio->second});
  }
  divide(offload.where == Offload::kOff ? std::numeric_limits<std::int64_t>::max() : offload.part_elements);
  for (const auto& batch : batches_) places_.release(states_of(batch));
}

void AdamW::divide(std::int64_t part_elements) {
  std::int64_t elements = part_elements;  // of the last batch
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto rows = slots_[i].states.master.size(0), columns = slots_[i].states.master.size(1);
    for (std::int64_t first = 0; first < rows;) {
      if (elements >= part_elements) {
        batches_.emplace_back();
        elements = 0;
      }
      const auto room = std::max<std::int64_t>((part_elements - elements) / std::max<std::int64_t>(columns, 1), 1);
      const auto count = std::min(rows - first, room);
      batches_.back().push_back({.slot = i, .first = first, .count = count});
      elements += count * columns;
      first += count;
    }
  }
}

std::vector<Tensor> AdamW::states_of(const std::vector<Part>& parts) const {
  std::vector<Tensor> list;
  for (const auto& [slot, first, count] : parts) {
    const auto states = slots_[slot].states.rows(first, count);
    if (slots_[slot].parameter->value.scalar_type() != kFloat) list.push_back(states.master);
    list.insert(list.end(), {states.exp_avg, states.exp_avg_sq});
  }
  return list;
}

void AdamW::step(const GradientSum& gradients, double lr, const Tensor& gradient_scale) {
  const at::NoGradGuard no_grad;
  ++steps_;
  const auto device = gradient_scale.device();
  const auto scale = device.is_cpu() ? gradient_scale.item<double>() : 1;
  const auto no_step = std::isnan(scale);
  for (std::size_t b = 0; b < batches_.size() && !no_step; ++b) {
    const auto& batch = batches_[b];
    if (b + 1 < batches_.size()) places_.expect(states_of(batches_[b + 1]));
    std::vector<Work> work;
    for (const auto& [slot, first, count] : batch) {
      const auto& sum = gradients.of(slot);
      work.push_back({.lr = lr * slots_[slot].lr_ratio,
                      .decay = slots_[slot].parameter->decay ? settings_.weight_decay : 0,
                      .gradient = sum.defined() ? rows_view(sum).narrow(0, first, count) : sum,
                      .states = slots_[slot].states.rows(first, count).to(device)});
    }
    if (device.is_cpu()) step_on_cpu(work, scale);
    else step_on_gpu(work, gradient_scale);
    std::vector<Tensor> to, from;  // parameters, and states that lie elsewhere
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto& [slot, first, count] = batch[i];
      const auto own = shards_.own_rows(slot, slots_[slot].parameter->value.detach()).narrow(0, first, count);
      const auto place = slots_[slot].states.rows(first, count);
      const auto& done = work[i].states;
      if (!done.master.is_alias_of(own)) {
        to.push_back(own);
        from.push_back(done.master);
      }
      take_back(done.master, place.master);
      take_back(done.exp_avg, place.exp_avg);
      take_back(done.exp_avg_sq, place.exp_avg_sq);
    }
    if (!to.empty()) at::_foreach_copy_(to, from);
    places_.release(states_of(batch));
  }
  shards_.publish();
}

void AdamW::step_on_cpu(std::vector<Work>& work, double gradient_scale) const {
  const auto count = static_cast<double>(steps_);
  for (auto& [lr, decay, given, states] : work) {
    const auto gradient = given.defined() ? given : at::zeros_like(states.master);
    const Update update{.lr = static_cast<float>(lr),
                        .decay = static_cast<float>(decay),
                        .beta1 = static_cast<float>(settings_.beta1),
                        .beta2 = static_cast<float>(settings_.beta2),
                        .eps = static_cast<float>(settings_.eps),
                        .gradient_scale = static_cast<float>(gradient_scale),
                        .correction1 = static_cast<float>(1 - std::pow(settings_.beta1, count)),
                        .sqrt_correction2 = static_cast<float>(std::sqrt(1 - std::pow(settings_.beta2, count)))};
    const auto* from = gradient.const_data_ptr<float>();
    auto *master = states.master.mutable_data_ptr<float>(), *first = states.exp_avg.mutable_data_ptr<float>(),
         *second = states.exp_avg_sq.mutable_data_ptr<float>();
    at::parallel_for(0, states.master.numel(), 1 << 14, [&](std::int64_t begin, std::int64_t end) {
      update_range(update, begin, end, from, master, first, second);
    });
  }
}

// The same formula in libtorch's kernel over many tensors at once: a call for each learning rate and decay. It divides
// gradients by its `grad_scale`, and leaves all as it is where `found_inf` is 1.
void AdamW::step_on_gpu(std::vector<Work>& work, const Tensor& gradient_scale) const {
  const auto divisor = gradient_scale.reciprocal().to(kFloat), skip = gradient_scale.isnan().to(kFloat);
  const auto step = at::full({}, static_cast<double>(steps_), divisor.options());
  std::map<std::pair<double, double>, std::vector<const Work*>> groups;
  for (const auto& part : work) groups[{part.lr, part.decay}].push_back(&part);
  for (const auto& group : groups) {
    const auto& [lr, decay] = group.first;
    std::vector<Tensor> masters, sums, exp_avgs, exp_avg_sqs;
    for (const auto* part : group.second) {
      masters.push_back(part->states.master);
      sums.push_back(part->gradient.defined() ? part->gradient : at::zeros_like(part->states.master));
      exp_avgs.push_back(part->states.exp_avg);
      exp_avg_sqs.push_back(part->states.exp_avg_sq);
    }
    at::_fused_adamw_(masters, sums, exp_avgs, exp_avg_sqs, {}, std::vector<Tensor>(masters.size(), step), lr,
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
    add("master", slot.states.master);
    add("exp_avg", slot.states.exp_avg);
    add("exp_avg_sq", slot.states.exp_avg_sq);
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
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto own = shards_.own_rows(i, slots_[i].parameter->value.detach());
    if (!slots_[i].states.master.is_alias_of(own)) own.copy_(slots_[i].states.master);
  }
  for (const auto& batch : batches_) places_.release(states_of(batch));
  shards_.publish();
}

}  // namespace sluice
