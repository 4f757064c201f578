// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/mesh.h"

#include <algorithm>
#include <cassert>

#include "sluice/core/error.h"
#include "sluice/parallel/communicator.h"

namespace sluice {
namespace {

constexpr auto kLayers = "group";  // what layers exchange tensors in

}  // namespace

struct Mesh::Place {
  std::int64_t d, c, t;  // data, context and tensor rank
  std::int64_t data, e;  // rank in data() and in ep()
};

Mesh::Place Mesh::place_of(std::int64_t rank) const {
  const auto data = rank / sizes_.tp;
  return {.d = data / sizes_.cp, .c = data % sizes_.cp, .t = rank % sizes_.tp, .data = data, .e = data % sizes_.ep};
}

const Group& Mesh::group_where(const std::string& purpose, const std::function<bool(const Place&)>& is_member) const {
  std::vector<std::int64_t> ranks;
  for (std::int64_t rank = 0; rank < sizes_.ranks(); ++rank) {
    if (is_member(place_of(rank))) ranks.push_back(rank);
  }
  const auto [place, is_new] = made_.try_emplace({purpose, ranks});
  if (is_new && ranks.size() > 1) {
    if (of_ != nullptr) place->second = Group(std::make_shared<Communicator>(*of_, ranks, purpose));
    else place->second = Group::on_paper(ranks, std::ranges::find(ranks, rank_) - ranks.begin());
  }
  return place->second;
}

Mesh::Mesh(const World& world, const MeshSizes& sizes) : of_(&world), sizes_(sizes), rank_(world.rank()) {
  if (sizes.ranks() != world.size()) {
    fail_usage(
        "parallel: data {} x context {} x tensor {} is a mesh of {} processes, and {} run.\n"
        "  Start as many, or choose sizes with that product.",
        sizes.dp, sizes.cp, sizes.tp, sizes.ranks(), world.size());
  }
  make_groups();
}

Mesh::Mesh(const MeshSizes& sizes, std::int64_t rank) : sizes_(sizes), rank_(rank) { make_groups(); }

void Mesh::make_groups() {
  if (sizes_.dp * sizes_.cp % sizes_.ep != 0) {
    fail_usage("parallel.ep: {} does not divide data {} x context {}, the ranks that experts are spread over.",
               sizes_.ep, sizes_.dp, sizes_.cp);
  }
  const auto own = place_of(rank_);
  world_ = group_where(kLayers, [](const Place&) { return true; });
  sequence_ = group_where(kLayers, [&](const Place& p) { return p.d == own.d; });
  tp_ = group_where(kLayers, [&](const Place& p) { return p.data == own.data; });
  data_ = group_where(kLayers, [&](const Place& p) { return p.t == own.t; });
  cp_ = group_where(kLayers, [&](const Place& p) { return p.d == own.d && p.t == own.t; });
  ep_ =
      group_where(kLayers, [&](const Place& p) { return p.t == own.t && p.data / sizes_.ep == own.data / sizes_.ep; });
  expert_data_ = group_where(kLayers, [&](const Place& p) { return p.t == own.t && p.e == own.e; });
}

const Group& Mesh::holders(std::int64_t tensor_pieces, std::int64_t expert_pieces) const {
  assert(sizes_.tp % tensor_pieces == 0 && (expert_pieces == 1 || expert_pieces == sizes_.ep));
  if (sizes_.ranks() == 1) return world_;
  const auto own = place_of(rank_);
  const auto sharing = sizes_.tp / tensor_pieces;
  return group_where("holders", [&](const Place& p) {
    return p.t / sharing == own.t / sharing && p.e % expert_pieces == own.e % expert_pieces;
  });
}

const Mesh& one_process() {
  static const Mesh mesh;
  return mesh;
}

}  // namespace sluice
