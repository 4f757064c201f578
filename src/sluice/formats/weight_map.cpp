// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/weight_map.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <unordered_map>

#include "sluice/core/edit_distance.h"
#include "sluice/core/error.h"
#include "sluice/core/wildcard.h"
#include "sluice/formats/json.h"
#include "sluice/formats/model_folder.h"

namespace sluice {

std::vector<WeightRules::Interleaved::Part> WeightRules::Interleaved::stretches() const {
  std::vector<Part> stretches;
  for (std::int64_t group = 0; group < groups; ++group) {
    for (const auto& part : parts) {
      stretches.push_back({part.parameter, part.first_row + group * part.rows, part.rows});
    }
  }
  return stretches;
}

const WeightRules::Prefix* prefix_of(std::string_view disk, const WeightRules& rules) {
  const auto found =
      std::ranges::find_if(rules.prefixes, [&](const auto& prefix) { return disk.starts_with(prefix.disk); });
  return found == rules.prefixes.end() ? nullptr : &*found;
}

std::string memory_name(const std::string& disk, const WeightRules& rules) {
  const auto* prefix = prefix_of(disk, rules);
  return prefix == nullptr ? disk : prefix->memory + disk.substr(prefix->disk.size());
}

std::string disk_name(const std::string& memory, const WeightRules::Prefix* prefix) {
  if (prefix == nullptr || !memory.starts_with(prefix->memory)) return memory;
  return prefix->disk + memory.substr(prefix->memory.size());
}

Interleaving interleaving_of(const std::string& parameter, const WeightRules& rules) {
  for (const auto& rule : rules.interleaved) {
    for (const auto& part : rule.parts) {
      if (!parameter.ends_with(part.parameter)) continue;
      return {&rule, parameter.substr(0, parameter.size() - part.parameter.size()),
              part.parameter == rule.parts[0].parameter};
    }
  }
  return {};
}

namespace {

constexpr std::string_view kNumber = "{}";

struct PieceName {
  std::string parameter;  // whole name in memory
  std::int64_t number;
  std::size_t part;  // index into Pieces::pieces
};

// "model.layers.0.mlp.experts.3.up_proj.weight" -> {"model.layers.0.mlp.experts.gate_up_proj", 3, 1}
std::optional<PieceName> parse_piece(std::string_view name, const WeightRules::Pieces& rule) {
  for (std::size_t part = 0; part < rule.pieces.size(); ++part) {
    const std::string_view piece = rule.pieces[part];
    const auto hole = piece.find(kNumber);
    const auto before = piece.substr(0, hole), after = piece.substr(hole + kNumber.size());
    if (!name.ends_with(after)) continue;
    const auto stem = name.substr(0, name.size() - after.size());
    const auto last_other = stem.find_last_not_of("0123456789");
    const auto digits = stem.substr(last_other + 1);  // npos + 1 is 0
    const auto head = stem.substr(0, stem.size() - digits.size());
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    const auto plain = error == std::errc() && (digits == "0" || digits[0] != '0');  // "03" is no number of ours
    if (!plain || !head.ends_with(before)) continue;
    return PieceName{std::string(head.substr(0, head.size() - before.size())) + rule.parameter, number, part};
  }
  return std::nullopt;
}

std::string piece_name(const std::string& parameter, const WeightRules::Pieces& rule, std::int64_t number,
                       std::size_t part) {
  const auto& piece = rule.pieces[part];
  const auto hole = piece.find(kNumber);
  return parameter.substr(0, parameter.size() - rule.parameter.size()) + piece.substr(0, hole) +
         std::to_string(number) + piece.substr(hole + kNumber.size());
}

std::int64_t product(std::span<const std::int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

using Index = std::unordered_map<std::string, std::size_t>;  // of the wanted tensors by name

Index index_of(std::span<const WantedTensor> wanted) {
  Index index;
  for (std::size_t i = 0; i < wanted.size(); ++i) index.emplace(wanted[i].name, i);
  return index;
}

// The interleaved tensor that begins with `parameter`: its shape, and what its runs are.
MappedTensor interleaved_tensor(const Interleaving& interleaving, std::size_t parameter, const Index& index,
                                std::span<const WantedTensor> wanted) {
  const auto& rule = *interleaving.rule;
  MappedTensor tensor{
      .disk = {.name = interleaving.beginning + rule.tensor, .dtype = {}, .shape = wanted[parameter].shape}};
  const auto columns = product(std::span(wanted[parameter].shape).subspan(1));
  std::int64_t rows = 0;
  for (const auto& stretch : rule.stretches()) {
    tensor.runs.push_back(
        {index.at(interleaving.beginning + stretch.parameter), stretch.first_row * columns, stretch.rows * columns});
    rows += stretch.rows;
  }
  tensor.disk.shape[0] = rows;
  return tensor;
}

// Things of one kind that went wrong: the count and the first are told.
class Faults {
 public:
  explicit Faults(std::string_view what) : what_(what) {}
  void add(std::string text) {
    ++count_;
    if (texts_.size() < 1000) texts_.push_back(std::move(text));  // enough to look for a nearest name
  }
  const std::vector<std::string>& texts() const { return texts_; }
  void append_to(std::string& message) const {
    if (count_ == 0) return;
    message += fmt::format("\n  {} tensor{} {} (first: {})", count_, count_ == 1 ? "" : "s", what_, texts_[0]);
  }

 private:
  std::string_view what_;
  std::size_t count_ = 0;
  std::vector<std::string> texts_;
};

class Mapper {
 public:
  Mapper(std::span<const WantedTensor> wanted, const WeightRules& rules)
      : wanted_(wanted), rules_(rules), index_(index_of(wanted)), filled_(wanted.size()) {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      filled_[i].interleaving = interleaving_of(wanted[i].name, rules);
      if (!filled_[i].interleaving.first) continue;
      interleaved_.emplace(filled_[i].interleaving.beginning + filled_[i].interleaving.rule->tensor, i);
    }
  }

  std::vector<MappedTensor> map(const std::string& where, std::span<const TensorInfo> on_disk) {
    for (const auto& tensor : on_disk) mapped_.push_back(place(tensor));
    for (std::size_t i = 0; i < wanted_.size(); ++i) check(i);
    report(where);
    return std::move(mapped_);
  }

 private:
  // What is known of a parameter: the tensor that holds all of it, its pieces, or the interleaved tensor that it is the
  // first of.
  struct Filled {
    Interleaving interleaving;
    std::vector<std::size_t> whole;  // indices into mapped_
    const WeightRules::Pieces* rule = nullptr;
    std::map<std::pair<std::int64_t, std::size_t>, std::vector<std::size_t>> pieces;  // by number and part
  };

  MappedTensor place(const TensorInfo& tensor) {
    MappedTensor mapped{.disk = tensor};
    const auto here = mapped_.size();
    const auto name = memory_name(tensor.name, rules_);
    if (const auto* prefix = prefix_of(tensor.name, rules_)) seen_prefix_ = prefix;
    if (const auto found = interleaved_.find(name); found != interleaved_.end()) {
      filled_[found->second].whole.push_back(here);
      return mapped;
    }
    if (const auto found = index_.find(name);
        found != index_.end() && filled_[found->second].interleaving.rule == nullptr) {
      filled_[found->second].whole.push_back(here);
      return mapped;
    }
    for (const auto& rule : rules_.pieces) {
      const auto piece = parse_piece(name, rule);
      if (!piece) continue;
      const auto found = index_.find(piece->parameter);
      if (found == index_.end()) continue;
      auto& filled = filled_[found->second];
      filled.rule = &rule;
      filled.pieces[{piece->number, piece->part}].push_back(here);
      return mapped;
    }
    for (const auto& aside : rules_.aside) {
      if (!matches(aside.pattern, tensor.name)) continue;
      mapped.aside_reason = aside.reason;
      mapped.exported = aside.exported;
      return mapped;
    }
    unexpected_.add(printable(tensor.name));
    return mapped;
  }

  void check(std::size_t parameter) {
    const auto& filled = filled_[parameter];
    const auto& wanted = wanted_[parameter];
    const auto& [rule, beginning, first] = filled.interleaving;
    if (rule != nullptr && !first) return;
    if (filled.whole.empty() && filled.pieces.empty()) {
      missing_.add(disk_name(rule == nullptr ? wanted.name : beginning + rule->tensor, seen_prefix_));
    } else if (filled.whole.size() > 1) {
      add_twice(filled.whole[0], filled.whole[1]);
    } else if (!filled.whole.empty() && !filled.pieces.empty()) {
      add_twice(filled.whole[0], filled.pieces.begin()->second[0]);
    } else if (rule != nullptr) {
      auto tensor = interleaved_tensor(filled.interleaving, parameter, index_, wanted_);
      check_one(filled.whole[0], wanted, tensor.disk.shape);
      mapped_[filled.whole[0]].runs = std::move(tensor.runs);
    } else if (!filled.whole.empty()) {
      check_one(filled.whole[0], wanted, wanted.shape);
      mapped_[filled.whole[0]].runs = {{parameter, 0, product(wanted.shape)}};
    } else {
      check_pieces(parameter, filled);
    }
  }

  void check_pieces(std::size_t parameter, const Filled& filled) {
    const auto& wanted = wanted_[parameter];
    const auto& rule = *filled.rule;
    const auto parts = static_cast<std::int64_t>(rule.pieces.size());
    // Of pieces without a known count there are as many as the rows of one of them imply; a gap is a missing one.
    const auto& one = mapped_[filled.pieces.begin()->second[0]].disk.shape;
    const auto rows = one.empty() ? 0 : one[0];
    const auto numbers = rule.stacked ? wanted.shape[0]
                         : rows > 0   ? std::max<std::int64_t>(wanted.shape[0] / rows / parts, 1)
                                      : 1;
    auto shape = wanted.shape;
    if (rule.stacked) shape.erase(shape.begin());
    const auto divisor = rule.stacked ? parts : numbers * parts;
    if (shape.empty() || shape[0] % divisor != 0) {
      misshapen_.add(fmt::format("{}: {} cannot be cut into {} equal pieces", disk_name(wanted.name, seen_prefix_),
                                 shape_text(wanted.shape), numbers * parts));
      return;
    }
    shape[0] /= divisor;
    const auto elements = product(shape);
    for (std::int64_t number = 0; number < numbers; ++number) {
      for (std::size_t part = 0; part < rule.pieces.size(); ++part) {
        const auto found = filled.pieces.find({number, part});
        if (found == filled.pieces.end()) {
          missing_.add(disk_name(piece_name(wanted.name, rule, number, part), seen_prefix_));
          continue;
        }
        if (found->second.size() > 1) add_twice(found->second[0], found->second[1]);
        const auto offset = (number * parts + static_cast<std::int64_t>(part)) * elements;
        mapped_[found->second[0]].runs = {{parameter, offset, elements}};
        check_one(found->second[0], wanted, shape);
      }
    }
    for (const auto& [key, indices] : filled.pieces) {
      if (key.first < numbers) continue;
      if (is_cropped(wanted)) {
        mapped_[indices[0]].aside_reason = "cut off";
        mapped_[indices[0]].exported = false;
      } else {
        unexpected_.add(printable(mapped_[indices[0]].disk.name));
      }
    }
  }

  bool is_cropped(const WantedTensor& wanted) const {
    return std::ranges::any_of(rules_.cropped, [&](const auto& pattern) { return matches(pattern, wanted.name); });
  }

  void check_one(std::size_t index, const WantedTensor& wanted, const std::vector<std::int64_t>& shape) {
    auto& disk = mapped_[index].disk;
    const bool larger = disk.shape.size() == shape.size() && !shape.empty() && disk.shape[0] > shape[0] &&
                        std::equal(shape.begin() + 1, shape.end(), disk.shape.begin() + 1);
    if (larger && is_cropped(wanted)) disk.shape = shape;
    if (disk.shape != shape) {
      misshapen_.add(
          fmt::format("{}: expected {}, found {}", printable(disk.name), shape_text(shape), shape_text(disk.shape)));
    } else if (wanted.floating && !is_plain_float(disk.dtype)) {
      unusable_.add(fmt::format("{}: {}", printable(disk.name), dtype_name(disk.dtype)));
    }
  }

  void add_twice(std::size_t first, std::size_t second) {
    twice_.add(fmt::format("{} and {}", printable(mapped_[first].disk.name), printable(mapped_[second].disk.name)));
  }

  void report(const std::string& where) const {
    std::string message;
    for (const auto* faults : {&missing_, &unexpected_, &misshapen_, &unusable_, &twice_}) faults->append_to(message);
    if (message.empty()) return;
    fail_data("{}: the weights do not fit the model that config.json describes:{}\n  {}", where, message, advice());
  }

  std::string advice() const {
    if (!missing_.texts().empty()) {
      // One renamed tensor shows as a missing and an unexpected one with nearly the same name.
      const auto& missing = missing_.texts()[0];
      const std::string* nearest = nullptr;
      std::size_t least = 5;  // letters; farther apart they are two things
      for (const auto& name : unexpected_.texts()) {
        const auto distance = name.size() > missing.size() + least || missing.size() > name.size() + least
                                  ? least
                                  : edit_distance(name, missing);
        if (distance < least) least = distance, nearest = &name;
      }
      if (nearest != nullptr) return fmt::format("{} looks like {} under another name; rename it.", *nearest, missing);
    }
    if (!unusable_.texts().empty())
      return "FP8 needs its scales, NAME_scale_inv; other quantised weights are not read: give the bf16 folder of this "
             "model.";
    return "Check that config.json and the weights are of the same model, and download the folder again.";
  }

  std::span<const WantedTensor> wanted_;
  const WeightRules& rules_;
  Index index_;
  Index interleaved_;  // the first parameter of each interleaved tensor, by the tensor's name in memory
  std::vector<Filled> filled_;
  std::vector<MappedTensor> mapped_;
  const WeightRules::Prefix* seen_prefix_ = nullptr;
  Faults missing_{"missing"}, unexpected_{"unexpected"}, misshapen_{"of another shape"},
      unusable_{"of a dtype without its scale"}, twice_{"stored twice"};
};

// The pieces of a new model's parameter.
void append_pieces(const WantedTensor& wanted, std::size_t parameter, const WeightRules::Pieces& rule,
                   std::vector<MappedTensor>& tensors) {
  const auto parts = static_cast<std::int64_t>(rule.pieces.size());
  const auto numbers = rule.stacked ? wanted.shape[0] : rule.fresh_count;
  std::vector<std::int64_t> shape(wanted.shape.begin() + (rule.stacked ? 1 : 0), wanted.shape.end());
  shape[0] /= rule.stacked ? parts : numbers * parts;
  const auto elements = product(shape);
  for (std::int64_t i = 0; i < numbers * parts; ++i) {
    const auto name = piece_name(wanted.name, rule, i / parts, static_cast<std::size_t>(i % parts));
    tensors.push_back({.disk = {name, {}, shape}, .runs = {{parameter, i * elements, elements}}});
  }
}

}  // namespace

std::vector<MappedTensor> in_pieces(const MappedTensor& whole, std::span<const WantedTensor> wanted,
                                    const WeightRules& rules) {
  std::vector<MappedTensor> pieces;
  if (whole.runs.size() != 1 || whole.disk.shape != wanted[whole.runs[0].parameter].shape) return pieces;
  const auto parameter = whole.runs[0].parameter;
  const auto rule = std::ranges::find_if(rules.pieces, [&](const WeightRules::Pieces& candidate) {
    return candidate.stacked && wanted[parameter].name.ends_with(candidate.parameter);
  });
  if (rule == rules.pieces.end()) return pieces;
  append_pieces(wanted[parameter], parameter, *rule, pieces);
  for (auto& piece : pieces) {
    piece.disk.name = disk_name(piece.disk.name, prefix_of(whole.disk.name, rules));
    piece.disk.dtype = whole.disk.dtype;
  }
  return pieces;
}

std::vector<MappedTensor> map_weights(const std::string& where, std::span<const TensorInfo> on_disk,
                                      std::span<const WantedTensor> wanted, const WeightRules& rules) {
  return Mapper(wanted, rules).map(where, on_disk);
}

std::vector<MappedTensor> fresh_tensors(std::span<const WantedTensor> wanted, std::span<const Dtype> dtypes,
                                        const WeightRules& rules) {
  const auto index = index_of(wanted);
  std::vector<MappedTensor> tensors;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto first_new = tensors.size();
    const auto pieces = std::ranges::find_if(rules.pieces, [&](const WeightRules::Pieces& rule) {
      return rule.fresh && wanted[i].name.ends_with(rule.parameter);
    });
    if (const auto interleaving = interleaving_of(wanted[i].name, rules); interleaving.rule != nullptr) {
      if (interleaving.first) tensors.push_back(interleaved_tensor(interleaving, i, index, wanted));
    } else if (pieces != rules.pieces.end()) {
      append_pieces(wanted[i], i, *pieces, tensors);
    } else {
      tensors.push_back(
          {.disk = {wanted[i].name, dtypes[i], wanted[i].shape}, .runs = {{i, 0, product(wanted[i].shape)}}});
    }
    for (auto n = first_new; n < tensors.size(); ++n) tensors[n].disk.dtype = dtypes[i];
  }
  return tensors;
}

}  // namespace sluice
