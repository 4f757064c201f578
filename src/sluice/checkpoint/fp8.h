// SPDX-License-Identifier: Apache-2.0
// Weights in FP8 (e4m3: 1 sign, 4 exponent and 3 mantissa bits, up to 448) with a scale for each block of rows and
// columns, as DeepSeek-V3 brought them (arXiv 2412.19437, section 3.3) and the published FP8 folders of Qwen3-Next and
// later have them: value = stored * scale of its block. The last block of a row or column may be smaller.
#pragma once

#include "sluice/core/tensor.h"
#include "sluice/formats/model_folder.h"

namespace sluice {

// weight [.., out, in] to scales [.., blocks of out, blocks of in] bfloat16: a block's largest magnitude over 448, or 1
// for a block of zeros.
Tensor fp8_scales(const Tensor& weight, BlockSize block);

// weight / scale, rounded to e4m3. An element that is normal there keeps its value within 1/16.
Tensor fp8_quantized(const Tensor& weight, const Tensor& scales, BlockSize block);

// stored * scale, computed in float32, in `dtype`. `scales` of one element: it is that of the whole tensor.
Tensor fp8_values(const Tensor& stored, const Tensor& scales, BlockSize block, at::ScalarType dtype);

}  // namespace sluice
