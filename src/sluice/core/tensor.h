// SPDX-License-Identifier: Apache-2.0
// libtorch, as much of it as we use. Precompiled once for all targets (cmake/folder.cmake), so that a source that
// includes it compiles in seconds; nothing includes torch/torch.h or torch/all.h.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace sluice {

using at::Tensor;
using at::kBFloat16;
using at::kDouble;
using at::kFloat;
using at::kInt;
using at::kLong;

// "[4096, 32] float32", for messages.
std::string describe(const Tensor& tensor);

}  // namespace sluice
