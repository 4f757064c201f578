// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/tensor_parts.h"

#include <algorithm>
#include <charconv>

#include "sluice/core/error.h"
#include "sluice/formats/safetensors.h"

namespace sluice {
namespace {

constexpr std::string_view kOf = " of [", kAt = "] at ";

bool is_whole(const TensorParts& tensor, const TensorPart& part) {
  return part.box.elements() == whole_box(tensor.shape).elements();
}

// Numbers with commas between; none where the text is anything else.
std::optional<std::vector<std::int64_t>> parse_numbers(std::string_view text) {
  std::vector<std::int64_t> numbers;
  while (!text.empty()) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || number < 0) return std::nullopt;
    numbers.push_back(number);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (text.empty()) return numbers;
    if (text.front() != ',') return std::nullopt;
    text.remove_prefix(text.starts_with(", ") ? 2 : 1);
    if (text.empty()) return std::nullopt;
  }
  return numbers;
}

// Whether the part lies within the tensor. The sizes are of a file: nothing is multiplied.
bool is_within(const Box& box, const Box& whole) {
  return box.row <= whole.rows && box.rows <= whole.rows - box.row && box.column <= whole.columns &&
         box.columns <= whole.columns - box.column;
}

}  // namespace

TensorParts whole_tensor(std::string name, const Tensor& tensor) {
  return {.name = std::move(name),
          .shape = tensor.sizes().vec(),
          .parts = {{.box = whole_box(tensor.sizes()), .values = rows_view(tensor)}}};
}

void copy_boxes(const TensorParts& from, const std::vector<Box>& boxes, const Tensor& to) {
  const auto whole = whole_box(from.shape);
  std::int64_t row = 0;
  for (const auto& box : boxes) {
    std::int64_t found = 0;
    const auto own = to.narrow(0, row, box.rows);
    for (const auto& part : from.parts) {
      if (!is_within(part.box, whole)) {
        fail_data(
            "checkpoint: a part of {} begins at row {}, column {} and has {} x {} elements, outside the tensor {}",
            from.name, part.box.row, part.box.column, part.box.rows, part.box.columns, shape_text(from.shape));
      }
      const auto common = intersection(part.box, box);
      if (common.elements() == 0) continue;
      const auto piece = [&](const Tensor& values, const Box& of) {
        return values.narrow(0, common.row - of.row, common.rows).narrow(1, common.column - of.column, common.columns);
      };
      piece(own, box).copy_(piece(part.values, part.box));
      found += common.elements();
    }
    if (found != box.elements()) {
      fail_data("checkpoint: {} of the {} elements that {} needs from row {}, column {} on are stored", found,
                box.elements(), from.name, box.row, box.column);
    }
    row += box.rows;
  }
}

Tensor assemble(const TensorParts& from) {
  if (from.parts.size() == 1 && is_whole(from, from.parts[0])) return from.parts[0].values.view(from.shape);
  if (from.parts.empty()) fail_data("checkpoint: no part of {} is stored", from.name);
  const auto whole = whole_box(from.shape);
  const auto tensor = at::empty({whole.rows, whole.columns}, from.parts[0].values.options());
  copy_boxes(from, {whole}, tensor);
  return tensor.view(from.shape);
}

std::string part_name(const TensorParts& tensor, const TensorPart& part) {
  if (is_whole(tensor, part)) return tensor.name;
  return fmt::format("{} of {} at {},{}", tensor.name, shape_text(tensor.shape), part.box.row, part.box.column);
}

std::optional<PartName> parse_part_name(std::string_view name, std::span<const std::int64_t> stored) {
  const auto of = name.rfind(kOf), at = name.rfind(kAt);
  if (of == std::string_view::npos) {
    return PartName{std::string(name), {stored.begin(), stored.end()}, whole_box(stored)};
  }
  if (at == std::string_view::npos || at < of) return std::nullopt;
  const auto shape = parse_numbers(name.substr(of + kOf.size(), at - of - kOf.size()));
  const auto first = parse_numbers(name.substr(at + kAt.size()));
  if (!shape || !first || first->size() != 2 || stored.size() != 2) return std::nullopt;
  std::int64_t elements = 1;
  for (const auto length : *shape) {
    if (__builtin_mul_overflow(elements, length, &elements)) return std::nullopt;
  }
  return PartName{std::string(name.substr(0, of)),
                  *shape,
                  {.row = (*first)[0], .rows = stored[0], .column = (*first)[1], .columns = stored[1]}};
}

}  // namespace sluice
