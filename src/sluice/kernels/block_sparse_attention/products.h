// SPDX-License-Identifier: Apache-2.0
// Products between a few rows, the query heads that share keys, and many rows, those keys. The few are the lanes of a
// vector where a sum runs over a row's columns, so that no vector is ever summed over its lanes. Every sum is in the
// order of its terms, however many rows a call has.
//
// A matrix of lanes is [n, kLanes], a column for each of the few rows, zero where there are fewer. Rows that are not
// lanes are padded with zeros to a multiple of kLanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"

namespace sluice {

template <typename Real>
inline constexpr std::int64_t kLanes = 64 / sizeof(Real);

template <typename Real>
struct LaneVector {
  typedef Real Type __attribute__((vector_size(64)));  // machines with shorter vectors take several
};

template <typename Real>
constexpr std::int64_t padded(std::int64_t width) {
  return (width + kLanes<Real> - 1) / kLanes<Real> * kLanes<Real>;
}

// to [width, kLanes]: x [count, width], turned around.
template <typename Scalar>
SLUICE_MULTIARCH void widen_to_lanes(const Scalar* x, std::int64_t count, std::int64_t width, Wide<Scalar>* to) {
  constexpr auto lanes = kLanes<Wide<Scalar>>;
  std::fill_n(to, width * lanes, 0);
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t c = 0; c < width; ++c) to[c * lanes + r] = widen(x[r * width + c]);
  }
}

// to [count, padded(width)]: the rows of `from`, which lie at row_of(i) * stride.
template <typename Scalar>
SLUICE_MULTIARCH void widen_rows(const Scalar* from, std::int64_t stride, const std::int64_t* row_of,
                                 std::int64_t count, std::int64_t width, Wide<Scalar>* __restrict to) {
  const auto whole = padded<Wide<Scalar>>(width);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto* row = from + row_of[i] * stride;
    for (std::int64_t c = 0; c < width; ++c) to[i * whole + c] = widen(row[c]);
    std::fill(to + i * whole + width, to + (i + 1) * whole, 0);
  }
}

template <int kRows, typename Real>
SLUICE_INLINE void multiply_tile(const Real* const* rows, const Real* lanes, std::int64_t width, Real* out) {
  typename LaneVector<Real>::Type x, sums[kRows] = {};
  for (std::int64_t c = 0; c < width; ++c) {
    std::memcpy(&x, lanes + c * kLanes<Real>, sizeof x);
    for (int j = 0; j < kRows; ++j) sums[j] += rows[j][c] * x;
  }
  std::memcpy(out, sums, sizeof sums);
}

// out [count, kLanes] = rows [count, width] * lanes [width, kLanes].
template <typename Real>
SLUICE_MULTIARCH void multiply(const Real* const* rows, std::int64_t count, const Real* lanes, std::int64_t width,
                               Real* out) {
  std::int64_t j = 0;
  for (; j + 8 <= count; j += 8) multiply_tile<8>(rows + j, lanes, width, out + j * kLanes<Real>);
  for (; j < count; ++j) multiply_tile<1>(rows + j, lanes, width, out + j * kLanes<Real>);
}

// What each row of a sum takes of each row of `from`.
template <typename Real>
struct Weights {
  const Real* first;
  std::int64_t row_stride, from_stride;
};

template <int kRows, int kColumns, typename Real>
SLUICE_INLINE void add_tile(Real* const* to, const Real* const* from, std::int64_t count, const Weights<Real>& weights,
                            std::int64_t column) {
  using Vector = typename LaneVector<Real>::Type;
  Vector sums[kRows][kColumns];
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < kColumns; ++c) std::memcpy(&sums[i][c], to[i] + column + c * kLanes<Real>, sizeof(Vector));
  }
  const auto* weight = weights.first;
  for (std::int64_t k = 0; k < count; ++k, weight += weights.from_stride) {
    for (int c = 0; c < kColumns; ++c) {
      Vector x;
      std::memcpy(&x, from[k] + column + c * kLanes<Real>, sizeof x);
      for (int i = 0; i < kRows; ++i) sums[i][c] += weight[i * weights.row_stride] * x;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < kColumns; ++c) std::memcpy(to[i] + column + c * kLanes<Real>, &sums[i][c], sizeof(Vector));
  }
}

template <int kRows, typename Real>
SLUICE_INLINE void add_row_tile(Real* const* to, const Real* const* from, std::int64_t count,
                                const Weights<Real>& weights, std::int64_t width) {
  std::int64_t column = 0;
  for (; column + 2 * kLanes<Real> <= width; column += 2 * kLanes<Real>) {
    add_tile<kRows, 2>(to, from, count, weights, column);
  }
  if (column < width) add_tile<kRows, 1>(to, from, count, weights, column);
}

// to [rows, width] += weights [rows, count] * from [count, width]; width is padded.
template <typename Real>
SLUICE_MULTIARCH void add_products(Real* const* to, std::int64_t rows, const Real* const* from, std::int64_t count,
                                   Weights<Real> weights, std::int64_t width) {
  std::int64_t i = 0;
  for (; i + 4 <= rows; i += 4, weights.first += 4 * weights.row_stride) {
    add_row_tile<4>(to + i, from, count, weights, width);
  }
  for (; i < rows; ++i, weights.first += weights.row_stride) add_row_tile<1>(to + i, from, count, weights, width);
}

}  // namespace sluice
