// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/fp8.h"

#include <vector>

namespace sluice {
namespace {

constexpr double kLargest = 448;

// Each block's scale at each of its elements: [.., blocks of out, blocks of in] to [.., out, in], float32.
Tensor at_elements(const Tensor& scales, at::IntArrayRef shape, BlockSize block) {
  const auto rows = scales.to(kFloat).repeat_interleave(block.rows, -2).narrow(-2, 0, shape[shape.size() - 2]);
  return rows.repeat_interleave(block.columns, -1).narrow(-1, 0, shape[shape.size() - 1]);
}

// f(one matrix of each of `tensors`) for all of them, stacked: a tensor of experts is as large as a layer, so what is
// widened to float32 is one expert.
template <typename F>
Tensor by_matrix(const F& f, const Tensor& x) {
  if (x.dim() == 2) return f(x, 0);
  std::vector<Tensor> parts;
  for (std::int64_t i = 0; i < x.size(0); ++i) parts.push_back(f(x[i], i));
  return at::stack(parts);
}

Tensor part(const Tensor& scales, std::int64_t index) { return scales.dim() == 2 ? scales : scales[index]; }

}  // namespace

Tensor fp8_scales(const Tensor& weight, BlockSize block) {
  return by_matrix(
      [&](const Tensor& matrix, std::int64_t) {
        const auto down = blocks_of(matrix.size(0), block.rows), across = blocks_of(matrix.size(1), block.columns);
        const auto padded = at::constant_pad_nd(matrix.to(kFloat).abs(), {0, across * block.columns - matrix.size(1), 0,
                                                                          down * block.rows - matrix.size(0)});
        const auto largest = padded.view({down, block.rows, across, block.columns}).amax({1, 3});
        const auto rounded = (largest / kLargest).to(kBFloat16);
        return rounded.masked_fill(rounded == 0, 1);
      },
      weight);
}

Tensor fp8_quantized(const Tensor& weight, const Tensor& scales, BlockSize block) {
  return by_matrix(
      [&](const Tensor& matrix, std::int64_t index) {
        const auto scaled = matrix.to(kFloat) / at_elements(part(scales, index), matrix.sizes(), block);
        return scaled.clamp(-kLargest, kLargest).to(at::kFloat8_e4m3fn);
      },
      weight);
}

Tensor fp8_values(const Tensor& stored, const Tensor& scales, BlockSize block, at::ScalarType dtype) {
  if (scales.numel() == 1 && stored.numel() > 1) return (stored.to(kFloat) * scales.to(kFloat)).to(dtype);
  return by_matrix(
      [&](const Tensor& matrix, std::int64_t index) {
        return (matrix.to(kFloat) * at_elements(part(scales, index), matrix.sizes(), block)).to(dtype);
      },
      stored);
}

}  // namespace sluice
