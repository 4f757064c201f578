// SPDX-License-Identifier: Apache-2.0
// exp for softmax rows and sigmoids, in a form that compilers turn into vector code; std::exp stays a scalar call.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace sluice {

// e^x for x <= 0, within 2e-7 relative; 0 below -87.3, where the result would be denormal; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; the series of e^r is cut after r^7 / 7!, a remainder of 5e-9.
__attribute__((always_inline)) inline float exp_nonpositive(float x) {
  constexpr float kLowest = -87.3F, kRound = 12582912.F;  // 1.5 * 2^23: adding it rounds to an integer
  const float inside = x < kLowest ? kLowest : x;
  const float n = (inside * 1.44269504F + kRound) - kRound;
  const float r = (inside - n * 0.693145752F) - n * 1.42860677e-6F;  // ln 2 in two parts, the first exact times n
  float series = 1.F / 5040;
  series = series * r + 1.F / 720;
  series = series * r + 1.F / 120;
  series = series * r + 1.F / 24;
  series = series * r + 1.F / 6;
  series = series * r + 0.5F;
  series = series * r + 1.F;
  series = series * r + 1.F;
  const auto power = std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
  return x < kLowest ? 0.F : series * power;
}

inline double exp_nonpositive(double x) { return std::exp(x); }

}  // namespace sluice
