// SPDX-License-Identifier: Apache-2.0
// Weights of a model folder into a model's parameters. Every tensor of the folder fills a parameter or is set aside for
// a reason that the family states; everything else is one error (formats/weight_map.h).
#pragma once

#include <string>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/formats/model_folder.h"
#include "sluice/formats/weight_map.h"
#include "sluice/layers/parameter.h"

namespace sluice {

// What became of the folder's tensors.
struct LoadReport {
  struct Row {
    TensorInfo disk;
    std::string parameter;  // name in memory, of several with commas between; empty: set aside
    std::string aside_reason;
  };
  std::vector<Row> rows;              // by disk name
  std::vector<std::string> unlisted;  // in a shard but not in the index: not read
  std::int64_t shared = 0;            // parameters that lie over the mapped file without a copy

  // "set aside: 333 tensors (vision tower), 15 tensors (multi-token prediction head)"; empty if there are none.
  std::string aside_line() const;
};

// What these parameters ask of a folder.
std::vector<WantedTensor> wanted_tensors(const std::vector<Parameter*>& parameters);

// The map alone, without touching a parameter; FP8 tensors count as bfloat16. Data error as map_weights().
std::vector<MappedTensor> map_folder(const ModelFolder& folder, const std::vector<Parameter*>& parameters,
                                     const WeightRules& rules);

// The names of the parameters that a tensor fills, with commas between; empty: set aside.
std::string parameter_names(const MappedTensor& mapped, const std::vector<Parameter*>& parameters);

// bfloat16 if a model of that precision holds every mapped tensor without loss, otherwise float32.
at::ScalarType lossless_dtype(const std::vector<MappedTensor>& map, const std::vector<Parameter*>& parameters);

// Sets every parameter's value on the CPU, in the dtype that it is held in. A tensor that has that dtype on disk is not
// copied: the value lies over the mapped file, copy-on-write, and may be trained in place. A parameter that is held as
// stored lies over it in any dtype, and in its pieces. Data error for a tensor that follows from the configuration and
// holds other values. Logs what was set aside, and warns of tensors that the index does not name. A rank of a mesh
// reads its pieces alone.
LoadReport load_parameters(const ModelFolder& folder, const std::vector<Parameter*>& parameters,
                           const WeightRules& rules, at::ScalarType model_dtype, const MeshPlace& place = {});

}  // namespace sluice
