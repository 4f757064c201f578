// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "sluice/parallel/group.h"

namespace sluice {

// While it lives, counts what the exchanges of groups on paper would send (parallel/collectives.h). One at a time.
class PaperExchanges {
 public:
  PaperExchanges();
  ~PaperExchanges();
  PaperExchanges(const PaperExchanges&) = delete;  // exchanges know it by address
  PaperExchanges& operator=(const PaperExchanges&) = delete;

  struct Sum {
    std::int64_t calls = 0;
    double bytes = 0;  // that leave one rank, where each sends everything once around (ring and pairwise algorithms)
  };
  using Sums = std::map<std::vector<std::int64_t>, Sum>;  // by the members of the group
  Sums waited_for() const;
  Sums beside() const;  // those that go on beside what their callers do

  // Of one exchange; nothing where nobody counts.
  static void note(const Group& group, double bytes, bool beside);

 private:
  Sums waited_for_, beside_;
};

}  // namespace sluice
