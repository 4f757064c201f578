// SPDX-License-Identifier: Apache-2.0
// The processes of a run as a box of data x context x tensor ranks. A layer asks the mesh for its group and is correct
// at every size; a mesh of one process is the ordinary case, not another path.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sluice/parallel/group.h"

namespace sluice {

class World;

struct MeshSizes {
  std::int64_t dp = 1;  // data: each works on packs of its own
  std::int64_t cp = 1;  // context: each holds a piece of a pack's tokens
  std::int64_t tp = 1;  // tensor: each holds some of a layer's heads or columns
  std::int64_t ep = 1;  // expert: each holds some of a layer's experts; these ranks are some of dp x cp
  std::int64_t ranks() const { return dp * cp * tp; }
};

// Rank (d cp + c) tp + t of the world is data rank d, context rank c and tensor rank t.
class Mesh {
 public:
  Mesh() = default;  // one process: every group is of this process alone

  // A usage error unless sizes.ranks() processes run and ep divides dp x cp. `world` outlives the mesh.
  Mesh(const World& world, const MeshSizes& sizes);

  // Rank `rank` of a mesh that does not run, for plans (Group::on_paper()). Sizes as above.
  Mesh(const MeshSizes& sizes, std::int64_t rank);
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  const MeshSizes& sizes() const { return sizes_; }
  const World* processes() const { return of_; }  // none: one process
  const Group& world() const { return world_; }
  const Group& tp() const { return tp_; }                    // same d and c
  const Group& cp() const { return cp_; }                    // same d and t
  const Group& sequence() const { return sequence_; }        // cp x tp, same d: those that work on one pack
  const Group& data() const { return data_; }                // dp x cp, same t
  const Group& ep() const { return ep_; }                    // `ep` consecutive ranks of data()
  const Group& expert_data() const { return expert_data_; }  // the ranks of data() that have the same rank in ep()

  // Those that hold the same piece of a parameter: one that is cut into `tensor_pieces`, each for tp / tensor_pieces
  // consecutive tensor ranks, and into `expert_pieces`, 1 or ep. Its members ask for their groups in the same order.
  // The group is another than the above even where its ranks are the same: its exchanges may go on beside a layer's.
  const Group& holders(std::int64_t tensor_pieces, std::int64_t expert_pieces) const;

 private:
  struct Place;
  Place place_of(std::int64_t rank) const;
  const Group& group_where(const std::string& purpose, const std::function<bool(const Place&)>& is_member) const;

  void make_groups();

  const World* of_ = nullptr;  // none: one process, or on paper
  MeshSizes sizes_;
  std::int64_t rank_ = 0;
  mutable std::map<std::pair<std::string, std::vector<std::int64_t>>, Group> made_;  // by purpose and ranks
  Group world_, tp_, cp_, sequence_, data_, ep_, expert_data_;
};

// The mesh of a process that runs alone.
const Mesh& one_process();

}  // namespace sluice
