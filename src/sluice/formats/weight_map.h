// SPDX-License-Identifier: Apache-2.0
// Which tensor on disk fills which parameter. A family states its rules once; loading, export and `sluice inspect`
// follow the map that they give. Nothing is left over: a tensor fills a parameter, or is set aside for a stated reason,
// or is an error.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/formats/safetensors.h"

namespace sluice {

struct WeightRules {
  // "model.language_model." on disk is "model." in memory. The first that fits is taken; other names stand for
  // themselves.
  struct Prefix {
    std::string disk, memory;
  };
  // Tensors that this program does not use, by pattern of their disk name (`*` stands for any characters). They are
  // copied into an export, unless they only repeat a parameter (a head tied to the embedding).
  struct Aside {
    std::string pattern, reason;
    bool exported = true;
  };
  // A parameter may lie on disk in numbered pieces: all parameters whose names end in `parameter`, from tensors whose
  // names end in `pieces`, where "{}" is the number. Pieces laid one after another, by number and then in the order of
  // `pieces`, have the parameter's bytes. Example: {"experts.gate_up_proj", {"experts.{}.gate_proj.weight",
  // "experts.{}.up_proj.weight"}}.
  struct Pieces {
    std::string parameter;
    std::vector<std::string> pieces;
    bool stacked =
        true;  // one number an entry of the first dimension; otherwise the rows are split evenly over the numbers
    bool fresh = false;            // a new model is written in pieces
    std::int64_t fresh_count = 0;  // into how many its rows are split then, where they are not stacked
  };
  // A tensor on disk may hold the rows of several parameters, interleaved: `groups` times its `parts`, one after
  // another, where group g of a part is rows first_row + g rows to first_row + (g + 1) rows of the part's parameter.
  // The tensor's name ends in `tensor` and the parameters' in `parameter`, after the same beginning. Such parameters
  // lie on disk in no other form.
  struct Interleaved {
    struct Part {
      std::string parameter;
      std::int64_t first_row, rows;
    };
    std::string tensor;
    std::int64_t groups;
    std::vector<Part> parts;
    std::vector<Part> stretches() const;  // the tensor from its first row to its last, one part of a group each
  };
  // Parameters, by pattern of their name, of which the model has fewer entries of the first dimension than the disk:
  // the first ones are taken.
  std::vector<std::string> cropped = {};
  // What the family's published FP8 folders hold in FP8, by pattern of the name on disk, experts one by one.
  std::vector<std::string> fp8 = {};
  std::vector<Prefix> prefixes = {};
  std::vector<Aside> aside = {};
  std::vector<Pieces> pieces = {};
  std::vector<Interleaved> interleaved = {};
};

// The prefix that a name on disk begins with; null if it has none of them.
const WeightRules::Prefix* prefix_of(std::string_view disk, const WeightRules& rules);
std::string memory_name(const std::string& disk, const WeightRules& rules);
// A name in memory on a disk that uses `prefix`, which may be null.
std::string disk_name(const std::string& memory, const WeightRules::Prefix* prefix);

// Where a parameter's rows lie, if not in a tensor of its own.
struct Interleaving {
  const WeightRules::Interleaved* rule = nullptr;  // null: the parameter lies by itself
  std::string beginning;                           // of the names, before the rule's
  bool first = false;                              // the tensor is accounted for at the first of its parameters
};
Interleaving interleaving_of(const std::string& parameter, const WeightRules& rules);

struct WantedTensor {
  std::string name;  // in memory
  std::vector<std::int64_t> shape;
  bool floating = true;  // takes F16, BF16, F32, F64 alone: other dtypes mean values that need a scale
};

// Neighbouring elements of a tensor on disk that are neighbours in a parameter too.
struct Run {
  std::size_t parameter;  // index into the wanted tensors
  std::int64_t offset;    // elements of the parameter before the run's
  std::int64_t elements;
};

struct MappedTensor {
  TensorInfo disk;             // of a cropped one what is taken of it
  std::vector<Run> runs = {};  // one after another they are the tensor; none: set aside
  std::string aside_reason = {};
  bool exported = true;
};

// One entry for each tensor on disk, in the order given. `where` names the folder in errors. One data error for
// everything that does not fit: missing, unexpected, misshapen, of an unusable dtype, stored twice; with counts and the
// first of each.
std::vector<MappedTensor> map_weights(const std::string& where, std::span<const TensorInfo> on_disk,
                                      std::span<const WantedTensor> wanted, const WeightRules& rules);

// A tensor that is the whole of a stacked parameter, as the pieces that the rules know it in; empty where they know
// none.
std::vector<MappedTensor> in_pieces(const MappedTensor& whole, std::span<const WantedTensor> wanted,
                                    const WeightRules& rules);

// How a new model is written: each parameter as it is, in pieces or interleaved with others, as the rules say. `dtypes`
// are those of the parameters.
std::vector<MappedTensor> fresh_tensors(std::span<const WantedTensor> wanted, std::span<const Dtype> dtypes,
                                        const WeightRules& rules);

}  // namespace sluice
