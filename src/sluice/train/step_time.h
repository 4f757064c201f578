// SPDX-License-Identifier: Apache-2.0
// How long a step of a training run would take on H200s, before there are any: what the step computes, moves and
// exchanges on paper (train/paper_step.h), at rates that were measured.
#pragma once

#include "sluice/train/paper_step.h"

namespace sluice {

// Of one H200 and its links.
namespace rates {

// bfloat16 operations of a product. Large ones reach 760 to 805 (libtorch 2.11, cuBLAS).
inline constexpr double kProducts = 780e12;
// Bytes read and written by a copy.
inline constexpr double kMemory = 4.27e12;
// Bytes to the host's memory or from it, page-locked. The datasheet's: 64e9 of PCIe 5 x16.
inline constexpr double kHost = 64e9;
// Bytes that leave a GPU for others of its machine, and the time of an exchange of nothing. Fitted to NCCL's all-gather
// of [T, 2560] in bfloat16 between two: 0.066 ms at 4k tokens, 0.19 at 16k, 0.68 at 64k.
inline constexpr double kLink = 257e9, kExchange = 27e-6;
inline constexpr std::int64_t kGpusOfMachine = 8;
// The same between machines. Not measured: the datasheet's 400 Gbit/s of an adapter for each GPU.
inline constexpr double kNetwork = 50e9;

}  // namespace rates

// Seconds, of one rank.
struct StepTime {
  double products = 0;   // operations at rates::kProducts, those that are computed again too
  double memory = 0;     // what operators write, and read once, at rates::kMemory
  double exchanges = 0;  // that layers wait for, and of updated parameters
  double gradients = 0;  // their exchange, as far as it takes longer than the backward pass that it goes on beside
  double optimizer = 0;  // gradients, masters, moments and parameters read and written; to the host and back, where
                         // they lie there
  double together() const { return products + memory + exchanges + gradients + optimizer; }
};

// `model` as PaperStep takes it. The states of a file are taken to be in the host's memory.
StepTime estimate_step(const Model& model, const PlannedRun& run);

}  // namespace sluice
