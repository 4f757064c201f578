// SPDX-License-Identifier: Apache-2.0
// LoRA adapters as PEFT keeps them: a folder with adapter_config.json and adapter_model.safetensors, whose tensors are
// named after the modules of transformers' model. Ours differs from it in two places, which are bridged here:
//   - Projections that lie interleaved in one tensor on disk have adapters of their own. On disk they are one adapter
//   of
//     the joined rank: A one below the other, B with a block of columns for each. Read back, each gets all of A.
//   - An expert's pair is [rank, in] and [out, rank]; PEFT has A of all experts one below the other, [E rank, in], and
//     B [out, rank E] with the experts innermost. Two adapted tensors of one module are nested wrappers there: the
//     first declared is "experts.base_layer", the last "experts".
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sluice/formats/model_folder.h"
#include "sluice/formats/weight_map.h"
#include "sluice/layers/lora.h"

namespace sluice {

// Writes the adapters that the parameters have; the folder appears whole or not at all. Names follow those of `base`.
// Usage error if `out` exists and is not empty.
void export_adapter(const std::filesystem::path& out, const std::vector<Parameter*>& parameters,
                    const LoraSettings& settings, const ModelFolder& base, const WeightRules& rules);

// Gives the parameters the adapters of a folder, held in `dtype`, and freezes all parameters; the settings are those
// that the folder states for all. Data error for a kind of adapter that we do not have (DoRA, biases, ...), and for a
// tensor that matches no parameter or has another shape.
LoraSettings load_adapter(const std::filesystem::path& folder, const std::vector<Parameter*>& parameters,
                          const WeightRules& rules, at::ScalarType dtype);

// Adds every adapter to its parameter, in float32 and rounded once to the dtype of the parameter, and removes it.
void merge_adapters(const std::vector<Parameter*>& parameters);

}  // namespace sluice
