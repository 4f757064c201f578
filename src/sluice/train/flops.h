// SPDX-License-Identifier: Apache-2.0
// Model operations of training and what a device could do: their quotient is the model FLOP utilisation (MFU;
// Chowdhery et al. 2022, "PaLM", appendix B).
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "sluice/core/tensor.h"
#include "sluice/data/packing.h"
#include "sluice/train/step.h"

namespace sluice {

// Training does three times the operations of a forward pass: the backward pass has two products for each of its own,
// one for either factor's gradient. What is computed again is not counted.
inline constexpr double kTrainingFactor = 3;

double total(const Operations& operations);

// Of one optimizer step over these packs: attention by their lengths, the head for the tokens that are trained. A
// decoder that is not trained goes forward alone.
double training_operations(const Objective& objective, std::span<const PackedBatch> packs);

// Dense bfloat16 operations a second of a GPU by the name that its driver gives, from the vendor's datasheets; nothing
// for a name that is not known, or another dtype.
std::optional<double> peak_operations_per_s(std::string_view device_name, at::ScalarType dtype);

}  // namespace sluice
