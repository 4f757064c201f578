// SPDX-License-Identifier: Apache-2.0
// Arithmetic of row loops on the CPU: conversion to the accumulation type and back, sums in a fixed order, the sigmoid.
// Plain loops over these functions become vector code in a function marked SLUICE_MULTIARCH.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "sluice/core/tensor.h"
#include "sluice/kernels/common/exp.h"

// The body must become part of each SLUICE_MULTIARCH clone that calls it.
#define SLUICE_INLINE __attribute__((always_inline)) inline

namespace sluice {

// The type in which values of type Scalar are computed with.
template <typename Scalar>
using Wide = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;

SLUICE_INLINE float widen(float x) { return x; }
SLUICE_INLINE double widen(double x) { return x; }
SLUICE_INLINE float widen(c10::BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.x) << 16); }

// Rounds to nearest, ties to even.
template <typename Scalar>
SLUICE_INLINE Scalar narrow(Wide<Scalar> x) {
  if constexpr (std::is_same_v<Scalar, c10::BFloat16>) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const auto rounded = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return {std::isnan(x) ? std::uint16_t{0x7fc0} : rounded, c10::BFloat16::from_bits()};
  } else {
    return x;
  }
}

// term(0) + .. + term(count - 1) as running sums that are added pairwise at the end. The order depends on `count`
// alone, so equal rows give equal bits wherever they lie; 32 sums keep two vectors of 16 floats busy.
template <typename Sum, typename Term>
SLUICE_INLINE Sum lane_sum(std::int64_t count, const Term& term) {
  constexpr int kLanes = 32;
  Sum lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// The largest of `count` values, -infinity of none; a NaN is passed over.
template <typename Real>
SLUICE_INLINE Real lane_max(const Real* x, std::int64_t count) {
  constexpr int kLanes = 32;
  Real lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<Real>::infinity());
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  for (; i < count; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  return *std::max_element(lanes, lanes + kLanes);
}

// 1 / sqrt(mean(x^2) + eps); 0 where the squares overflow.
template <typename Scalar>
SLUICE_INLINE Wide<Scalar> inverse_rms(const Scalar* x, std::int64_t width, Wide<Scalar> eps) {
  const auto squares = lane_sum<Wide<Scalar>>(width, [x](std::int64_t i) { return widen(x[i]) * widen(x[i]); });
  return 1 / std::sqrt(squares / static_cast<Wide<Scalar>>(width) + eps);
}

// value = 1 / (1 + e^-x), complement = 1 - value without cancellation. A NaN gives NaN.
template <typename Real>
struct Sigmoid {
  Real value, complement;
};
SLUICE_INLINE Sigmoid<float> sigmoid(float x) {
  const float small = exp_nonpositive(-std::abs(x));
  const float larger = 1 / (1 + small), smaller = small * larger;
  return {x < 0 ? smaller : larger, x < 0 ? larger : smaller};
}
SLUICE_INLINE Sigmoid<double> sigmoid(double x) { return {1 / (1 + std::exp(-x)), 1 / (1 + std::exp(x))}; }

}  // namespace sluice
