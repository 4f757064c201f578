// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/step_time.h"

#include <algorithm>

#include "sluice/parallel/paper_exchanges.h"
#include "sluice/train/flops.h"

namespace sluice {
namespace {

double seconds_of(const PaperExchanges::Sums& exchanges) {
  double sum = 0;
  for (const auto& [members, of_group] : exchanges) {
    const bool within = members.front() / rates::kGpusOfMachine == members.back() / rates::kGpusOfMachine;
    const auto bytes_per_s = within ? rates::kLink : rates::kNetwork;
    sum += static_cast<double>(of_group.calls) * rates::kExchange + of_group.bytes / bytes_per_s;
  }
  return sum;
}

// Of a row, by all the ranks that share it.
double operations_of_row(const PaperStep& step, const PlannedRun& run) {
  const auto objective = step.objective();
  const std::vector row{full_row(run.seq_len)};
  const auto again = run.recompute ? total(objective.decoder.forward_operations(std::vector{run.seq_len}, 0)) : 0;
  return training_operations(objective, row) + again;
}

double optimizer_seconds(const PaperStep& step, const PlannedRun& run) {
  const Shards shards(step.trained(), run.mesh);
  double bytes = 0, states = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto& value = shards.parameter(i).value;
    const auto own = static_cast<double>(shards.own_rows(i, value.detach()).numel());
    const auto its_states = value.scalar_type() == kFloat ? 2 : 3;
    states += 2 * 4 * own * its_states;                                      // read and written
    bytes += 2 * 4 * own + static_cast<double>(value.element_size()) * own;  // gradient: norm, update; parameter
  }
  return (bytes + states) / rates::kMemory + (run.offload == Offload::kOff ? 0 : states / rates::kHost);
}

}  // namespace

StepTime estimate_step(const Model& model, const PlannedRun& run) {
  const PaperStep step(model, run);
  const auto rows = static_cast<double>(run.rows_of_rank());
  StepTime time;
  time.products =
      rows * operations_of_row(step, run) / static_cast<double>(run.mesh.sequence().size()) / rates::kProducts;
  time.optimizer = optimizer_seconds(step, run);
  double gradients = 0;  // of one exchange of them
  {
    const PaperExchanges exchanges;
    const MetaMemory allocated;
    GradientSum sums(step.trained(), run.mesh, run.gradients);
    step.add_gradients(sums, /*rows=*/1);
    time.memory = rows * 2 * static_cast<double>(allocated.allocated()) / rates::kMemory;
    time.exchanges = rows * seconds_of(exchanges.waited_for());
    gradients = seconds_of(exchanges.beside());
  }
  {
    const PaperExchanges exchanges;
    Shards(step.trained(), run.mesh).publish();
    time.exchanges += seconds_of(exchanges.waited_for());
  }
  // Two thirds of a pass are backward.
  const auto backward = (time.products + time.memory + time.exchanges) / rows * 2 / 3;
  const auto times = run.gradients == GradientSum::Kept::kOwned ? rows : 1;
  time.gradients = times * std::max(0.0, gradients - backward);
  return time;
}

}  // namespace sluice
