// SPDX-License-Identifier: Apache-2.0
// libtorch, as much of it as we use. Precompiled once for all targets (cmake/folder.cmake), so that a source that
// includes it compiles in seconds; nothing includes torch/torch.h or torch/all.h.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace sluice {

using at::kBFloat16;
using at::kDouble;
using at::kFloat;
using at::kInt;
using at::kLong;
using at::Tensor;

// "[4096, 32] Float", for messages.
inline std::string describe(const Tensor& tensor) {
  return fmt::format("{} {}", c10::str(tensor.sizes()), c10::toString(tensor.scalar_type()));
}

}  // namespace sluice
