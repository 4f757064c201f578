// SPDX-License-Identifier: Apache-2.0
// Random numbers without a state: each is a function of where it is used, so a sequence draws the same ones whatever is
// sampled beside it.
#pragma once

#include <array>
#include <cstdint>

namespace sluice {

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3").
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

// Uniform in [0, 1), a multiple of 2^-53: the number of one position of one sequence.
double uniform(std::uint64_t seed, std::uint64_t sequence, std::uint64_t position);

}  // namespace sluice
