// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/memory.h"

#include <sys/resource.h>

namespace sluice {

std::int64_t peak_memory_bytes() {
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
}

}  // namespace sluice
