// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/whole_values.h"

#include <algorithm>

#include "sluice/core/error.h"
#include "sluice/formats/safetensors.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

constexpr std::size_t kKept = 4;  // q, k, v with z, b and a of a linear layer; both tensors of experts

}  // namespace

Tensor WholeValues::of(const Parameter& parameter) {
  const auto found = std::ranges::find(kept_, &parameter, [](const auto& pair) { return pair.first; });
  if (found != kept_.end()) return found->second;
  if (kept_.size() == kKept) kept_.pop_front();
  kept_.emplace_back(&parameter, gather(parameter));
  return kept_.back().second;
}

Tensor WholeValues::gather(const Parameter& parameter) const {
  const at::NoGradGuard no_grad;
  const auto place = place_of(mesh_);
  const auto& value = parameter.value;
  SLUICE_CHECK(value.defined() && value.sizes() == local_shape(parameter, place),
               "export: {} has no value of its declared shape {}", parameter.name, shape_text(parameter.shape));
  // Rank 0 and those along its axis that hold the other pieces.
  const bool experts = parameter.split.over == Split::Over::kExperts;
  const auto& axis = experts ? mesh_.ep() : mesh_.tp();
  const bool takes_part =
      experts ? mesh_.tp().rank() == 0 && mesh_.data().rank() < axis.size() : mesh_.data().rank() == 0;
  if (parameter.split.over == Split::Over::kNothing || axis.size() == 1) {
    return is_writer() ? value.detach().to(at::kCPU) : Tensor();
  }
  if (!takes_part) return {};
  const auto boxes_at = [&](std::int64_t rank) {
    auto there = place;
    (experts ? there.expert : there.tensor).rank = rank;
    return boxes_of(parameter, there);
  };
  std::vector<std::int64_t> elements(static_cast<std::size_t>(axis.size()));
  for (std::size_t rank = 0; rank < elements.size(); ++rank) {
    for (const auto& box : boxes_at(static_cast<std::int64_t>(rank))) elements[rank] += box.elements();
  }
  const auto flat = all_gather_rows(value.detach().reshape(-1), elements, axis);
  if (!is_writer()) return {};
  const auto pieces = flat.to(at::kCPU);
  const auto whole = at::empty(parameter.shape, pieces.options());
  std::int64_t at = 0;
  for (std::int64_t rank = 0; rank < axis.size(); ++rank) {
    for (const auto& box : boxes_at(rank)) {
      const auto rows = pieces.narrow(0, at, box.elements()).view({box.rows, box.columns});
      rows_view(whole).narrow(0, box.row, box.rows).narrow(1, box.column, box.columns).copy_(rows);
      at += box.elements();
    }
  }
  return whole;
}

}  // namespace sluice
