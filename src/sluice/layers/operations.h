// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

namespace sluice {

// Floating-point operations by part of a model, a multiply-add counted as two. Products, attention and recurrences are
// counted, as their equations read; what takes few operations an element (norms, activations, softmax) is not.
using Operations = std::map<std::string, double>;

}  // namespace sluice
