// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/recorded_packs.h"

#include <array>

#include "sluice/core/log.h"
#include "sluice/layers/lora.h"
#include "sluice/train/flops.h"

namespace sluice {
namespace {

// By the host, forward and backward of a block: 1.2 to 2.2 ms on machines with an H200, about 60 launches.
constexpr double kLaunchesOfBlock = 2.2e-3;
// Model operations a second that the device reaches where it never waits: an MFU of 42% for 16 sequences of 2,048
// tokens (bench/results, gpu_training).
constexpr double kOperations = 400e12;

// What a pass reads.
std::array<Tensor, 6> inputs(const Batch& batch) {
  return {batch.tokens, batch.pack.cu_seqlens, batch.pack.positions, batch.asked, batch.targets, batch.loss_weight};
}

}  // namespace

bool launches_bind(const Objective& objective, std::int64_t tokens) {
  const std::vector lengths{tokens};
  const auto operations = kTrainingFactor * total(objective.decoder.forward_operations(lengths, /*asked=*/tokens));
  return operations / kOperations < static_cast<double>(objective.decoder.num_blocks()) * kLaunchesOfBlock;
}

RecordedPacks::RecordedPacks(const Objective& objective, GradientSum& gradients, Recorder recorder)
    : objective_(objective), gradients_(gradients), recorder_(std::move(recorder)) {
  const auto options = at::TensorOptions().dtype(kDouble).device(objective.decoder.device());
  last_ = {.minimised = at::zeros({}, options), .parts = at::zeros({4}, options)};
  gradients_.keep_places();
}

void RecordedPacks::run(const Batch& batch) {
  const auto losses = pack_losses(objective_, batch);
  last_.minimised.copy_(losses.minimised.detach());
  last_.parts.copy_(losses.parts);
  gradients_.add(losses.minimised, /*last=*/true);
}

void RecordedPacks::record(const PackShape& shape, Batch batch) {
  if (passes_.empty()) log_info("short packs are recorded: their launches would take longer than their kernels");
  auto* beside = passes_.empty() ? nullptr : passes_.begin()->second.work.get();
  auto& pass = passes_[shape];
  pass.batch = std::move(batch);
  pass.work = recorder_([this, &own = pass.batch] { run(own); }, beside);
}

void RecordedPacks::replay(const Pass& pass, const Batch& batch) {
  const auto from = inputs(batch), to = inputs(pass.batch);
  for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  pass.work->replay();
}

PackLosses RecordedPacks::add(const PackedBatch& packed, double weight) {
  if (auto now = addresses(objective_.decoder.parameters()); now != weights_) {
    weights_ = std::move(now);
    passes_.clear();
  }
  const auto shape = filled_shape(packed);
  auto batch = filled_batch(packed, shape, objective_.decoder.device());
  batch.loss_weight.div_(weight);
  if (const auto pass = passes_.find(shape); pass != passes_.end()) replay(pass->second, batch);
  else if (seen_.insert(shape).second || passes_.size() == kMostShapes) run(batch);
  else record(shape, std::move(batch));
  return {.minimised = last_.minimised.clone(), .parts = last_.parts.clone()};
}

}  // namespace sluice
