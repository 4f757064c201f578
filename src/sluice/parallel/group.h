// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace sluice {

class Communicator;  // parallel/communicator.h

// Some of the run's processes, which exchange tensors (parallel/collectives.h). One process alone is a group too, in
// which every exchange is the identity and costs nothing. A copy is the same group.
class Group {
 public:
  Group() = default;
  explicit Group(std::shared_ptr<Communicator> communicator);
  // The `rank`-th of `members`, which are ranks of a world, without the others: it exchanges tensors of the meta
  // device, of which only sizes are known.
  static Group on_paper(std::vector<std::int64_t> members, std::int64_t rank) {
    Group group;
    group.rank_ = rank;
    group.size_ = std::ssize(members);
    group.members_ = std::make_shared<const std::vector<std::int64_t>>(std::move(members));
    return group;
  }
  std::int64_t rank() const { return rank_; }  // of this process in the group
  std::int64_t size() const { return size_; }
  bool is_on_paper() const { return members_ != nullptr; }
  const std::vector<std::int64_t>& members() const { return *members_; }  // of a group on paper
  Communicator& communicator() const { return *communicator_; }           // of a group of several, not on paper

 private:
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<const std::vector<std::int64_t>> members_;  // on paper
  std::int64_t rank_ = 0, size_ = 1;
};

}  // namespace sluice
