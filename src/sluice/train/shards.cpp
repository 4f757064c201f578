// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/shards.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "sluice/parallel/collectives.h"

namespace sluice {
Tensor Shards::Shard::rows_of(std::int64_t holder, const Tensor& piece) const {
  const auto first = first_row(holder);
  return rows_view(piece).narrow(0, first, first_row(holder + 1) - first);
}

Shards::Shards(const std::vector<Parameter*>& parameters, const Mesh& mesh, std::int64_t bucket_elements)
    : mesh_(mesh) {
  const auto place = place_of(mesh);
  using Kind = std::tuple<std::int64_t, std::int64_t, at::ScalarType>;  // the same on every rank, in the same order
  std::map<Kind, std::vector<std::size_t>> kinds;
  for (auto* parameter : parameters) {
    const auto& split = parameter->split;
    const auto pieces = count_pieces(split, place);
    const auto tensor_pieces = split.over == Split::Over::kTensor ? pieces : 1;
    const auto expert_pieces = split.over == Split::Over::kExperts ? pieces : 1;
    const auto& holders = mesh.holders(tensor_pieces, expert_pieces);
    const auto piece = whole_box(local_shape(*parameter, place));
    if (holders.size() > 1) {
      kinds[{tensor_pieces, expert_pieces, parameter->value.scalar_type()}].push_back(shards_.size());
    }
    shards_.push_back({.parameter = parameter,
                       .boxes = boxes_of(*parameter, place),
                       .rows = piece.rows,
                       .columns = piece.columns,
                       .holders = &holders});
  }
  for (auto& [kind, members] : kinds) {
    std::ranges::reverse(members);
    std::int64_t elements = 0;
    for (const auto i : members) {
      const auto own = shards_[i].rows * shards_[i].columns;
      if (elements == 0 || elements + own > bucket_elements) {
        buckets_.emplace_back();
        elements = 0;
      }
      buckets_.back().push_back(i);
      elements += own;
    }
  }
  std::ranges::sort(buckets_, std::greater<>(), [](const Bucket& bucket) { return bucket.back(); });
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (const auto i : buckets_[b]) shards_[i].bucket = b;
  }
}

Tensor Shards::own_rows(std::size_t i, const Tensor& x) const {
  return shards_[i].rows_of(shards_[i].holders->rank(), x);
}

std::vector<Box> Shards::own_boxes(std::size_t i) const {
  const auto& shard = shards_[i];
  const auto begin = shard.first_row(shard.holders->rank()), end = shard.first_row(shard.holders->rank() + 1);
  std::vector<Box> own;
  std::int64_t row = 0;  // of the piece
  for (const auto& box : shard.boxes) {
    const auto first = std::max(begin, row), last = std::min(end, row + box.rows);
    if (first < last) {
      own.push_back({.row = box.row + first - row, .rows = last - first, .column = box.column, .columns = box.columns});
    }
    row += box.rows;
  }
  return own;
}

std::vector<std::int64_t> Shards::elements_of_holders(const Bucket& bucket) const {
  std::vector<std::int64_t> elements(static_cast<std::size_t>(shards_[bucket[0]].holders->size()));
  for (std::size_t holder = 0; holder < elements.size(); ++holder) {
    for (const auto i : bucket) elements[holder] += shards_[i].elements_of(static_cast<std::int64_t>(holder));
  }
  return elements;
}

Shards::Sums Shards::start_sum(const Bucket& bucket, std::vector<Tensor>& gradients) const {
  const at::NoGradGuard no_grad;
  const auto& holders = *shards_[bucket[0]].holders;
  for (const auto i : bucket) {
    if (gradients[i].defined()) continue;
    gradients[i] = at::zeros_like(shards_[i].parameter->value, at::TensorOptions().dtype(kFloat));
  }
  std::vector<Tensor> parts;  // by holder, and for each by parameter
  for (std::int64_t holder = 0; holder < holders.size(); ++holder) {
    for (const auto i : bucket) parts.push_back(shards_[i].rows_of(holder, gradients[i]).reshape(-1));
  }
  const auto flat = at::cat(parts);
  for (const auto i : bucket) gradients[i].reset();
  return [this, &bucket, wait = start_reduce_scatter_rows(flat, elements_of_holders(bucket), holders)] {
    const auto own = wait();
    std::vector<Tensor> rows;
    std::int64_t at = 0;
    for (const auto i : bucket) {
      const auto elements = shards_[i].elements_of(shards_[i].holders->rank());
      rows.push_back(own.narrow(0, at, elements).view({-1, shards_[i].columns}));
      at += elements;
    }
    return rows;
  };
}

void Shards::publish() const {
  const at::NoGradGuard no_grad;
  for (const auto& bucket : buckets_) {
    const auto& holders = *shards_[bucket[0]].holders;
    std::vector<Tensor> own, to, from;
    for (const auto i : bucket) own.push_back(own_rows(i, shards_[i].parameter->value).reshape(-1));
    const auto all = all_gather_rows(at::cat(own), elements_of_holders(bucket), holders);
    std::int64_t at = 0;
    for (std::int64_t holder = 0; holder < holders.size(); ++holder) {
      for (const auto i : bucket) {
        const auto elements = shards_[i].elements_of(holder);
        to.push_back(shards_[i].rows_of(holder, shards_[i].parameter->value));
        from.push_back(all.narrow(0, at, elements).view_as(to.back()));
        at += elements;
      }
    }
    at::_foreach_copy_(to, from);
  }
}

}  // namespace sluice
