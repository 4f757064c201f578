// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/recorded_packs.h"

#include <array>

#include "sluice/core/log.h"
#include "sluice/layers/vocabulary.h"
#include "sluice/train/flops.h"

namespace sluice {
namespace {

// By the host, forward and backward of a block: 1.2 to 2.2 ms on machines with an H200, about 60 launches.
constexpr double kLaunchesOfBlock = 2.2e-3;
// Model operations a second that the device reaches where it never waits: an MFU of 42% for 16 sequences of 2,048
// tokens (bench/results, gpu_training).
constexpr double kOperations = 400e12;
// Each takes some MiB. Full packs have few; of others, those are recorded that come again first.
constexpr int kMostShapes = 64;

// What a pass reads.
std::array<Tensor, 6> inputs(const Batch& batch) {
  return {batch.tokens, batch.pack.cu_seqlens, batch.pack.positions, batch.asked, batch.targets, batch.loss_weight};
}

}  // namespace

std::string why_not_recorded(const Objective& objective) {
  if (objective.decoder.mesh().world().size() > 1) return "processes exchange tensors within it";
  if (!objective.decoder.is_recordable()) return "the host takes part in this model's layers";
  if (objective.mtp != nullptr) return "multi-token prediction is trained";
  if (objective.router_aux_loss_coef > 0) return "the load-balancing loss counts every token of a pack";
  if (objective.adapters != nullptr && objective.adapters->probability > 0) return "the host draws what adapters drop";
  return "";
}

bool launches_bind(const Objective& objective, std::int64_t tokens, std::int64_t asked) {
  const std::vector lengths{tokens};
  const auto operations = kTrainingFactor * total(objective.decoder.forward_operations(lengths, asked));
  return operations / kOperations < static_cast<double>(objective.decoder.num_blocks()) * kLaunchesOfBlock;
}

struct RecordedPacks::Pass {
  Batch batch;
  std::unique_ptr<RecordedWork> work;
};

RecordedPacks::RecordedPacks(const Objective& objective, GradientSum& gradients, Record record)
    : objective_(objective), gradients_(gradients), record_(std::move(record)) {
  const auto options = at::TensorOptions().device(objective.decoder.device());
  sums_ = {.loss = at::zeros({}, options.dtype(kDouble)), .right = at::zeros({}, options.dtype(kLong))};
}

RecordedPacks::~RecordedPacks() = default;

void RecordedPacks::run(const Batch& batch) {
  const auto& decoder = objective_.decoder;
  const auto hidden = decoder.forward(batch.tokens, batch.pack).index_select(0, batch.asked);
  const auto [loss, predicted] = vocabulary_loss(hidden, decoder.head(), batch.targets, batch.loss_weight,
                                                 batch.asked_rows, decoder.vocab_size(), decoder.mesh().tp());
  sums_.loss.copy_(loss.detach());
  sums_.right.copy_((predicted == batch.targets).bitwise_and(batch.targets != kIgnoredTarget).sum());
  gradients_.add(loss, /*last=*/true);
}

std::unique_ptr<RecordedPacks::Pass> RecordedPacks::record(Batch batch) {
  if (recorded_ == nullptr) log_info("short packs are recorded: their launches would take longer than their kernels");
  gradients_.keep_places();
  auto pass = std::make_unique<Pass>(Pass{.batch = std::move(batch), .work = nullptr});
  pass->work = record_([this, &own = pass->batch] { run(own); }, recorded_);
  recorded_ = pass->work.get();
  ++num_recorded_;
  return pass;
}

std::optional<RecordedPacks::Added> RecordedPacks::add(const PackedBatch& packed, double weight) {
  const auto shape = filled_shape(packed);
  if (!launches_bind(objective_, shape.tokens, shape.asked)) return std::nullopt;
  auto batch = filled_batch(packed, shape, objective_.decoder.device());
  batch.loss_weight.div_(weight);
  const auto place = passes_.find(shape);
  if (place == passes_.end()) {
    passes_.emplace(shape, nullptr);
    run(batch);
  } else if (place->second == nullptr && num_recorded_ == kMostShapes) {
    run(batch);
  } else if (place->second == nullptr) {
    place->second = record(std::move(batch));
  } else {
    const auto from = inputs(batch), to = inputs(place->second->batch);
    for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    place->second->work->replay();
  }
  return Added{.loss = sums_.loss.clone(), .right = sums_.right.clone()};
}

}  // namespace sluice
