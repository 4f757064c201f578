// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/group.h"

#include "sluice/parallel/communicator.h"

namespace sluice {

Group::Group(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)), rank_(communicator_->rank()), size_(communicator_->size()) {}

}  // namespace sluice
