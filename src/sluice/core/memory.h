// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace sluice {

// The most memory that this process has held at once, in bytes, as the system counts it.
std::int64_t peak_memory_bytes();

}  // namespace sluice
