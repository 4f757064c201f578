// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

namespace sluice {

class Communicator;  // parallel/communicator.h

// Some of the run's processes, which exchange tensors (parallel/collectives.h). One process alone is a group too, in
// which every exchange is the identity and costs nothing. A copy is the same group.
class Group {
 public:
  Group() = default;
  explicit Group(std::shared_ptr<Communicator> communicator);
  // A member without the others: it exchanges tensors of the meta device, of which only sizes are known.
  static Group on_paper(std::int64_t rank, std::int64_t size) {
    Group group;
    group.rank_ = rank;
    group.size_ = size;
    return group;
  }
  std::int64_t rank() const { return rank_; }  // of this process in the group
  std::int64_t size() const { return size_; }
  bool is_on_paper() const { return size_ > 1 && communicator_ == nullptr; }
  Communicator& communicator() const { return *communicator_; }  // of a group of several, not on paper

 private:
  std::shared_ptr<Communicator> communicator_;
  std::int64_t rank_ = 0, size_ = 1;
};

}  // namespace sluice
