// SPDX-License-Identifier: Apache-2.0
// The bfloat16 product is made of calls to oneDNN's block product, C [64, 64] (+)= A [64, depth] B [depth, 64]. B is
// first packed into panels of 64 columns, in which the two rows 2i, 2i + 1 are interleaved, as the instructions read
// them. oneDNN compiles a kernel for each combination of sizes and strides and keeps it; so that there are few, rows
// and columns past the end are padded, depth is cut into pieces of kDepth and the last one padded to a multiple of
// kStep, and operands with odd strides are copied block by block.
#include "sluice/kernels/common/matmul.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <exception>
#include <vector>

#include "sluice/kernels/common/lanes.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/rows.h"

namespace sluice {
namespace {

constexpr std::int64_t kBlock = 64;            // rows and columns of a block of C: the widest that oneDNN packs
constexpr std::int64_t kColumns = 16;          // that one instruction makes
constexpr std::int64_t kStep = 32;             // bfloat16 values of depth that one instruction takes
constexpr std::int64_t kDepth = 512;           // a block of A is then 64 KiB and stays near
constexpr std::int64_t kPanelBytes = 1 << 20;  // of B a thread packs at once: half of the second-level cache

constexpr std::int64_t kWideBytes = 8 << 20;  // of the larger operand that are widened at once, at least some rows
constexpr std::int64_t kLeastWideRows = 64;

using Word = std::uint32_t;  // two bfloat16 values, one above the other in B
using Half = std::uint16_t;  // the bits of one

std::int64_t round_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }

// Columns [0, columns) of b [k, n], by row, into a panel [depth / 2, 64].
SLUICE_MULTIARCH void pack_rows(const Half* __restrict b, std::int64_t stride, std::int64_t k, std::int64_t columns,
                                std::int64_t depth, Word* __restrict panel) {
  for (std::int64_t i = 0; i < depth / 2; ++i, panel += kBlock) {
    const Half *upper = b + 2 * i * stride, *lower = upper + stride;
    if (2 * i + 1 < k) {
      for (std::int64_t c = 0; c < columns; ++c) panel[c] = upper[c] | static_cast<Word>(lower[c]) << 16;
    } else {
      for (std::int64_t c = 0; c < columns; ++c) panel[c] = 2 * i < k ? upper[c] : 0;
    }
    std::fill(panel + columns, panel + kBlock, 0);
  }
}

// The same for a b that is stored by column: column c is `k` values at b + c * stride.
SLUICE_MULTIARCH void pack_columns(const Half* __restrict b, std::int64_t stride, std::int64_t k, std::int64_t columns,
                                   std::int64_t depth, Word* __restrict panel) {
  constexpr std::int64_t kWide = 16;
  std::memset(panel, 0, depth / 2 * kBlock * sizeof(Word));
  std::int64_t i = 0;
  for (; i + kWide <= k / 2; i += kWide) {
    for (std::int64_t c = 0; c < columns; ++c) {
      Word pairs[kWide];
      std::memcpy(pairs, b + c * stride + 2 * i, sizeof(pairs));
      for (std::int64_t j = 0; j < kWide; ++j) panel[(i + j) * kBlock + c] = pairs[j];
    }
  }
  for (; 2 * i < k; ++i) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const Half* pair = b + c * stride + 2 * i;
      panel[i * kBlock + c] = pair[0] | (2 * i + 1 < k ? static_cast<Word>(pair[1]) << 16 : 0);
    }
  }
}

// a, b and c as ATen holds them; b_by_column: b.stride(0) == 1.
struct Bf16Product {
  const at::BFloat16 *a, *b;
  float* c;
  std::int64_t m, n, k, a_stride, b_stride, c_row_stride, c_column_stride;
  bool b_by_column, accumulate;
};

// Room of one thread, kept between calls: a small product takes less time than allocating would.
struct Scratch {
  std::vector<Word> panels;
  std::vector<at::BFloat16> a;
  float c[kBlock * kBlock];
};

void pack_panels(const Bf16Product& p, std::int64_t first, std::int64_t last, std::int64_t depth, Word* panels) {
  const auto* b = reinterpret_cast<const Half*>(p.b);
  for (auto j = first; j < last; ++j, panels += depth / 2 * kBlock) {
    const auto columns = std::min(kBlock, p.n - j * kBlock);
    if (p.b_by_column) pack_columns(b + j * kBlock * p.b_stride, p.b_stride, p.k, columns, depth, panels);
    else pack_rows(b + j * kBlock, p.b_stride, p.k, columns, depth, panels);
  }
}

// A block of c becomes `from` [rows, 64], or more by it; the inner loop is over neighbours in c.
SLUICE_MULTIARCH void write_block(const Bf16Product& p, const float* __restrict from, std::int64_t rows,
                                  std::int64_t columns, float* __restrict c) {
  const bool by_row = p.c_column_stride == 1;
  const auto outer = by_row ? rows : columns, inner = by_row ? columns : rows;
  const auto stride = by_row ? p.c_row_stride : p.c_column_stride;
  const auto from_outer = by_row ? kBlock : 1, from_inner = by_row ? 1 : kBlock;
  for (std::int64_t i = 0; i < outer; ++i) {
    for (std::int64_t j = 0; j < inner; ++j) {
      auto& value = c[i * stride + j];
      const auto product = from[i * from_outer + j * from_inner];
      value = p.accumulate ? value + product : product;
    }
  }
}

// Rows [row, row + rows) of one panel's columns of c.
void multiply_block(const Bf16Product& p, const at::BFloat16* a, std::int64_t a_stride, const Word* panel,
                    std::int64_t depth, std::int64_t row, std::int64_t rows, std::int64_t column, Scratch& scratch) {
  const auto columns = std::min(kBlock, p.n - column);
  auto* c = p.c + row * p.c_row_stride + column * p.c_column_stride;
  const bool direct = rows == kBlock && columns == kBlock && p.c_column_stride == 1 && p.c_row_stride % kStep == 0;
  auto* to = direct ? c : scratch.c;
  const auto to_stride = direct ? p.c_row_stride : kBlock;
  const auto width = round_up(columns, kColumns);
  for (std::int64_t begin = 0; begin < depth; begin += kDepth) {
    at::native::cpublas::brgemm(kBlock, width, std::min(kDepth, depth - begin), a_stride, kBlock, to_stride,
                                begin > 0 || (direct && p.accumulate), a + begin,
                                reinterpret_cast<const at::BFloat16*>(panel + begin / 2 * kBlock), to);
  }
  if (!direct) write_block(p, to, rows, columns, c);
}

// The columns of panels [first, last) of rows [begin, end).
void multiply_panels(const Bf16Product& p, std::int64_t first, std::int64_t last, std::int64_t begin,
                     std::int64_t end) {
  thread_local Scratch scratch;
  const auto depth = round_up(p.k, kStep), panel_words = depth / 2 * kBlock;
  scratch.panels.resize(std::max<std::size_t>(scratch.panels.size(), (last - first) * panel_words));
  pack_panels(p, first, last, depth, scratch.panels.data());
  for (auto row = begin; row < end; row += kBlock) {
    const auto rows = std::min(kBlock, end - row);
    const auto* a = p.a + row * p.a_stride;
    auto a_stride = p.a_stride;
    if (rows < kBlock || depth != p.k || a_stride % kStep != 0) {
      scratch.a.assign(kBlock * depth, at::BFloat16(0.F));
      for (std::int64_t i = 0; i < rows; ++i) std::copy_n(a + i * a_stride, p.k, scratch.a.data() + i * depth);
      a = scratch.a.data();
      a_stride = depth;
    }
    for (auto j = first; j < last; ++j) {
      multiply_block(p, a, a_stride, scratch.panels.data() + (j - first) * panel_words, depth, row, rows, j * kBlock,
                     scratch);
    }
  }
  at::native::cpublas::brgemm_release();
}

void multiply(const Bf16Product& p) {
  const auto panels = round_up(p.n, kBlock) / kBlock;
  const auto panel_bytes = round_up(p.k, kStep) * kBlock * 2;
  const std::int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const auto at_once = std::max<std::int64_t>(1, kPanelBytes / panel_bytes);
  const auto groups = std::min(panels, round_up((panels + at_once - 1) / at_once, threads));
  const auto blocks = round_up(p.m, kBlock) / kBlock;  // of rows, which threads share where there are few panels
  const auto bands = std::min(blocks, (threads + groups - 1) / groups);
  at::parallel_for(0, groups * bands, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto g = i / bands, band = i % bands;
      multiply_panels(p, g * panels / groups, (g + 1) * panels / groups, band * blocks / bands * kBlock,
                      std::min((band + 1) * blocks / bands * kBlock, p.m));
    }
  });
}

// y = x w^T of a few rows x [m, k], a row of w [n, k] at a time.
template <typename Scalar, typename Result>
struct FewRows {
  const Scalar *x, *w;
  Result* y;
  std::int64_t m, k, x_stride, w_stride, y_row_stride, y_column_stride;

  SLUICE_MULTIARCH void columns(std::int64_t first, std::int64_t last) const {
    for (auto j = first; j < last; ++j) {
      const Scalar* weights = w + j * w_stride;
      for (std::int64_t i = 0; i < m; ++i) {
        const Scalar* row = x + i * x_stride;
        const auto sum =
            lane_sum<Wide<Scalar>>(k, [=](std::int64_t at) { return widen(weights[at]) * widen(row[at]); });
        y[i * y_row_stride + j * y_column_stride] = narrow<Result>(sum);
      }
    }
  }
};
constexpr std::int64_t kFewRows = 4;  // more are limited by arithmetic, of which libraries make less

template <typename Scalar, typename Result>
void multiply_few_rows(const Tensor& y, const Tensor& x, const Tensor& w) {
  const FewRows<Scalar, Result> rows{.x = x.const_data_ptr<Scalar>(),
                                     .w = w.const_data_ptr<Scalar>(),
                                     .y = y.mutable_data_ptr<Result>(),
                                     .m = x.size(0),
                                     .k = x.size(1),
                                     .x_stride = x.stride(0),
                                     .w_stride = w.stride(0),
                                     .y_row_stride = y.stride(0),
                                     .y_column_stride = y.stride(1)};
  at::parallel_for(0, w.size(0), rows_per_task(x.size(1)),
                   [&](std::int64_t first, std::int64_t last) { rows.columns(first, last); });
}

bool has_matrix_unit() {
  static const bool has = at::native::cpublas::could_pack(kBFloat16);
  return has;
}

// Whether oneDNN's block product reads panels as they are packed here: tried once, on whole numbers. Processors without
// a matrix unit but with products of bfloat16 (AVX512_BF16) have it too; a limit on what oneDNN may use takes it away.
bool has_block_product() {
  static const bool has = [] {
#ifdef __x86_64__
    if (!has_matrix_unit() && !__builtin_cpu_supports("avx512bf16")) return false;
#endif
    const auto a = at::arange(kBlock * kStep, kFloat).remainder(7).sub(3).to(kBFloat16).view({kBlock, kStep});
    const auto b = at::arange(kStep * kBlock, kFloat).remainder(5).sub(2).to(kBFloat16).view({kStep, kBlock});
    const auto c = at::zeros({kBlock, kBlock}, kFloat);
    std::vector<Word> panel(kStep / 2 * kBlock);
    pack_rows(reinterpret_cast<const Half*>(b.const_data_ptr<at::BFloat16>()), kBlock, kStep, kBlock, kStep,
              panel.data());
    try {
      at::native::cpublas::brgemm(kBlock, kBlock, kStep, kStep, kBlock, kBlock, false, a.const_data_ptr<at::BFloat16>(),
                                  reinterpret_cast<const at::BFloat16*>(panel.data()), c.mutable_data_ptr<float>());
      at::native::cpublas::brgemm_release();
    } catch (const std::exception&) {
      return false;
    }
    return c.equal(a.to(kFloat).mm(b.to(kFloat)));
  }();
  return has;
}

// Whether it did so.
bool multiply_few_rows(const Tensor& y, const Tensor& x, const Tensor& w) {
  const auto is_by_row = [](const Tensor& matrix) { return matrix.stride(1) == 1 || matrix.size(1) <= 1; };
  if (x.size(0) > kFewRows || !is_by_row(x) || !is_by_row(w)) return false;
  if (x.scalar_type() == kFloat) {
    multiply_few_rows<float, float>(y, x, w);
  } else if (x.scalar_type() == kBFloat16 && !has_matrix_unit()) {
    if (y.scalar_type() == kFloat) multiply_few_rows<at::BFloat16, float>(y, x, w);
    else multiply_few_rows<at::BFloat16, at::BFloat16>(y, x, w);
  } else {
    return false;
  }
  return true;
}

}  // namespace

void matmul_into(const Tensor& c, const Tensor& a, const Tensor& b, bool accumulate) {
  const at::AutoDispatchBelowAutograd below;
  assert(c.stride(1) == 1 || c.size(1) <= 1 || c.stride(0) == 1 || c.size(0) == 1);
  if (c.numel() == 0) return;
  if (!accumulate && multiply_few_rows(c.t(), b.t(), a)) return;
  if (a.scalar_type() != kBFloat16) {
    if (accumulate) at::addmm_out(const_cast<Tensor&>(c), c, a, b);
    else at::mm_out(const_cast<Tensor&>(c), a, b);
  } else if (!has_block_product() || a.size(1) == 0) {
    if (b.numel() > a.numel()) return matmul_into(c.t(), b.t(), a.t(), accumulate);
    const auto wide_b = b.to(kFloat);
    const auto row_bytes = std::max<std::int64_t>(a.size(1), 1) * static_cast<std::int64_t>(sizeof(float));
    const auto wide_rows = std::max(kWideBytes / row_bytes, kLeastWideRows);
    for (std::int64_t row = 0; row < c.size(0); row += wide_rows) {
      const auto rows = std::min(wide_rows, c.size(0) - row);
      matmul_into(c.narrow(0, row, rows), a.narrow(0, row, rows).to(kFloat), wide_b, accumulate);
    }
  } else {
    const auto rows = a.stride(1) == 1 || a.size(1) == 1 ? a : a.contiguous();
    const bool by_column = b.stride(1) != 1;
    multiply({.a = rows.const_data_ptr<at::BFloat16>(),
              .b = b.const_data_ptr<at::BFloat16>(),
              .c = c.mutable_data_ptr<float>(),
              .m = c.size(0),
              .n = c.size(1),
              .k = a.size(1),
              .a_stride = rows.stride(0),
              .b_stride = b.stride(by_column ? 1 : 0),
              .c_row_stride = c.stride(0),
              .c_column_stride = c.size(1) == 1 ? 1 : c.stride(1),
              .b_by_column = by_column,
              .accumulate = accumulate});
  }
}

Tensor times_weight(const Tensor& x, const Tensor& weight) {
  const bool is_recorded = at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  if (x.is_cpu() && x.dim() == 2 && x.size(0) <= kFewRows && x.scalar_type() == weight.scalar_type() && !is_recorded) {
    const auto y = at::empty({x.size(0), weight.size(0)}, x.options());
    if (multiply_few_rows(y, x, weight)) return y;
  }
  return at::linear(x, weight);
}

}  // namespace sluice
