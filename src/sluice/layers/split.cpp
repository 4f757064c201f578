// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/split.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cassert>
#include <numeric>

#include "sluice/core/error.h"
#include "sluice/layers/parameter.h"

namespace sluice {
namespace {

const MeshPlace::Axis& axis_of(const Split& split, const MeshPlace& place) {
  static const MeshPlace::Axis one;
  switch (split.over) {
    case Split::Over::kTensor:
      return place.tensor;
    case Split::Over::kExperts:
      return place.expert;
    case Split::Over::kNothing:
      return one;
  }
  return one;
}

bool is_divided(const Split& split, std::int64_t ranks) {
  if (split.over == Split::Over::kNothing || split.units == 0) return true;
  return split.units % ranks == 0 || (split.shared && ranks % split.units == 0);
}

// [first, first + count) along a dimension.
struct Stretch {
  std::int64_t first, count;
};

// Along split.dim.
std::vector<Stretch> stretches_of(const Parameter& parameter, const MeshPlace& place) {
  const auto& split = parameter.split;
  const auto& axis = axis_of(split, place);
  const auto length = parameter.shape.at(static_cast<std::size_t>(split.dim));
  const auto pieces = count_pieces(split, place);
  const auto piece = axis.rank / (axis.size / pieces);
  std::vector<Stretch> stretches;
  std::int64_t first = 0;
  for (const auto part : split.parts.empty() ? std::vector{length} : split.parts) {
    const auto begin = piece_begin(part, pieces, piece);
    stretches.push_back({first + begin, piece_begin(part, pieces, piece + 1) - begin});
    first += part;
  }
  assert(first == length);
  return stretches;
}

void check_axis(const std::vector<Parameter*>& parameters, Split::Over over, std::int64_t ranks,
                std::string_view option) {
  const auto fails = [&](std::int64_t count) {
    return std::ranges::find_if(parameters, [&](const Parameter* parameter) {
      return parameter->split.over == over && !is_divided(parameter->split, count);
    });
  };
  const auto first = fails(ranks);
  if (first == parameters.end()) return;
  std::vector<std::int64_t> good;
  for (std::int64_t count = 1; count <= (*first)->split.units; ++count) {
    if (fails(count) == parameters.end()) good.push_back(count);
  }
  fail_usage("{} = {}: the {} {} of {} cannot be divided among so many ranks.\n  This model takes {} = {}.", option,
             ranks, (*first)->split.units, over == Split::Over::kExperts ? "experts" : "heads", (*first)->name, option,
             fmt::join(good, ", "));
}

}  // namespace

MeshPlace place_of(const Mesh& mesh) {
  return {.tensor = {mesh.tp().rank(), mesh.tp().size()}, .expert = {mesh.ep().rank(), mesh.ep().size()}};
}

std::int64_t count_pieces(const Split& split, const MeshPlace& place) {
  const auto size = axis_of(split, place).size;
  return split.shared ? std::min(size, split.units) : size;
}

Box whole_box(std::span<const std::int64_t> shape) {
  const auto columns = shape.size() > 1 ? shape.back() : 1;
  const auto elements = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  return {.row = 0, .rows = columns == 0 ? 0 : elements / columns, .column = 0, .columns = columns};
}

Box intersection(const Box& a, const Box& b) {
  const auto row = std::max(a.row, b.row), column = std::max(a.column, b.column);
  return {.row = row,
          .rows = std::max<std::int64_t>(0, std::min(a.row + a.rows, b.row + b.rows) - row),
          .column = column,
          .columns = std::max<std::int64_t>(0, std::min(a.column + a.columns, b.column + b.columns) - column)};
}

Tensor rows_view(const Tensor& x) {
  const auto box = whole_box(x.sizes());
  return x.view({box.rows, box.columns});
}

std::vector<Box> boxes_of(const Parameter& parameter, const MeshPlace& place) {
  const auto whole = whole_box(parameter.shape);
  const auto& split = parameter.split;
  if (split.over == Split::Over::kNothing) return {whole};
  std::vector<Box> boxes;
  for (const auto& [first, count] : stretches_of(parameter, place)) {
    if (split.dim == 0) {
      const auto each = parameter.shape[0] == 0 ? 0 : whole.rows / parameter.shape[0];
      if (!boxes.empty() && boxes.back().row + boxes.back().rows == first * each) {
        boxes.back().rows += count * each;  // of one rank, parts follow each other
      } else {
        boxes.push_back({.row = first * each, .rows = count * each, .column = 0, .columns = whole.columns});
      }
    } else {
      assert(parameter.shape.size() == 2 && split.parts.empty());
      boxes.push_back({.row = 0, .rows = whole.rows, .column = first, .columns = count});
    }
  }
  return boxes;
}

std::vector<std::int64_t> local_shape(const Parameter& parameter, const MeshPlace& place) {
  auto shape = parameter.shape;
  if (parameter.split.over == Split::Over::kNothing) return shape;
  auto& length = shape[static_cast<std::size_t>(parameter.split.dim)];
  length = 0;
  for (const auto& stretch : stretches_of(parameter, place)) length += stretch.count;
  return shape;
}

Tensor take_piece(const Tensor& whole, const Parameter& parameter, const MeshPlace& place) {
  const auto rows = rows_view(whole);
  std::vector<Tensor> pieces;
  for (const auto& box : boxes_of(parameter, place)) {
    pieces.push_back(rows.narrow(0, box.row, box.rows).narrow(1, box.column, box.columns));
  }
  const auto piece = pieces.size() == 1 ? pieces[0].contiguous() : at::cat(pieces);
  return piece.view(local_shape(parameter, place));
}

void check_splits(const std::vector<Parameter*>& parameters, std::int64_t tensor_ranks, std::int64_t expert_ranks) {
  check_axis(parameters, Split::Over::kTensor, tensor_ranks, "parallel.tp");
  check_axis(parameters, Split::Over::kExperts, expert_ranks, "parallel.ep");
}

}  // namespace sluice
