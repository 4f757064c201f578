// SPDX-License-Identifier: Apache-2.0
// How an operator's C++ entry reaches its registered implementations (CPU, CUDA, Meta, Autograd): through the
// dispatcher, the same way that torch.ops.sluice.* does from Python.
#pragma once

#include <optional>

#include "sluice/core/tensor.h"

namespace sluice {

// A handle to the registered operator "sluice::name" of the given signature. Look it up once: `static const auto op =
// ...`.
template <typename Signature>
c10::TypedOperatorHandle<Signature> registered_operator(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

// An optional saved tensor, back from a variable list where "none" is an undefined tensor.
inline std::optional<Tensor> defined_or_none(const Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace sluice
