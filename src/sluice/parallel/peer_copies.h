// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "sluice/core/tensor.h"

namespace sluice {

// Rows that GPUs of one machine write into each other's memory by their copy engines. Products go on meanwhile at full
// speed, while NCCL's kernels take multiprocessors: a product that fills all of them waits for those, and ends no
// earlier than if it had come after the exchange.
class PeerCopies {
 public:
  using Bytes = std::vector<std::uint8_t>;
  using AllGather = std::function<std::vector<Bytes>(const Bytes&)>;  // everyone's bytes, by rank

  virtual ~PeerCopies() = default;

  // Makes room for messages of so many bytes, if there is less. All members call it, with the same number. False: this
  // GPU cannot reach another's memory.
  virtual bool make_room(std::size_t bytes, const AllGather& all_gather) = 0;

  // Sends x to member `to` and fills `into` with what `from` sends, contiguous and on the GPU, after all that the
  // current stream has been given. What comes back makes the current stream wait for both; x and `into` live until
  // then. Where a member is gone, the streams of the others wait until NCCL's next exchange takes too long.
  virtual std::function<void()> start_swap(const Tensor& x, std::int64_t to, const Tensor& into, std::int64_t from) = 0;
};

}  // namespace sluice
