// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/memory_plan.h"

#include <algorithm>

#include "sluice/train/recorded_packs.h"

namespace sluice {

TrainingMemory plan_training(const Model& model, const PlannedRun& run) {
  const PaperStep step(model, run);
  TrainingMemory memory{};
  for (const auto* parameter : step.held()) {
    const auto bytes = static_cast<std::int64_t>(parameter->value.nbytes());
    if (parameter->as_stored) memory.mapped += bytes / run.mesh.ep().size();
    else memory.parameters += bytes;
  }
  constexpr std::int64_t kFloatBytes = 4;
  const auto& trained = step.trained();
  const Shards shards(trained, run.mesh);
  for (std::size_t i = 0; i < trained.size(); ++i) {
    const auto& value = trained[i]->value;
    const auto own = shards.own_rows(i, value.detach()).numel() * kFloatBytes;
    memory.optimizer += value.scalar_type() == kFloat ? 2 * own : 3 * own;
    memory.checkpoint_copy += 3 * own;
    memory.gradients += run.gradients == GradientSum::Kept::kOwned ? own : value.numel() * kFloatBytes;
  }
  if (run.offload != Offload::kOff) {
    memory.offloaded = memory.optimizer;
    memory.optimizer = std::min(memory.optimizer, 3 * kFloatBytes * OffloadSettings().part_elements);
  }
  if (run.offload == Offload::kDisk) memory.checkpoint_copy = 0;
  const MetaMemory counted;
  GradientSum gradients(trained, run.mesh, run.gradients);
  step.add_gradients(gradients, std::min<std::int64_t>(run.rows_of_rank(), 2));  // a third row is as the second
  memory.gradients = std::min(memory.gradients, counted.peak());  // of one micro-batch, some go out as others come
  memory.activations = counted.peak() - memory.gradients;
  const auto objective = step.objective();
  if (model.decoder->why_not_on_gpu(run.dtype).empty() && why_not_recorded(objective).empty() &&
      launches_bind(objective, run.seq_len)) {
    const auto launched = counted.peak();
    gradients.keep_places();
    const auto sums = counted.live();
    step.add_gradients(gradients, /*rows=*/1);
    const auto peak = counted.peak();
    memory.recorded = (peak - launched) + (peak - sums);
  }
  return memory;
}

std::int64_t plan_states(const Decoder& decoder, std::int64_t slots, std::int64_t capacity) {
  const MetaMemory counted;
  const auto state = decoder.new_state(slots, capacity);
  return counted.live();
}

}  // namespace sluice
