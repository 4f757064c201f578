// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/draw_tokens/draw_tokens.h"

#include "sluice/kernels/common/operator.h"
#include "sluice/kernels/draw_tokens/inputs.h"

namespace sluice {
namespace {

using Signature = Tensor(const Tensor&, std::int64_t, const Tensor&, const std::optional<Tensor>&);

Tensor meta(const Tensor& logits, std::int64_t drawable, const Tensor& settings, const std::optional<Tensor>& seen) {
  check_draw_tokens(logits, drawable, settings, seen);
  return at::empty_symint({logits.sym_size(0), kDrawnToken}, logits.options().dtype(kDouble));
}

}  // namespace

Tensor draw_tokens(const Tensor& logits, std::int64_t drawable, const Tensor& settings,
                   const std::optional<Tensor>& seen) {
  static const auto op = registered_operator<Signature>("sluice::draw_tokens");
  return op.call(logits, drawable, settings, seen);
}

TORCH_LIBRARY_FRAGMENT(sluice, m) {
  m.def("draw_tokens(Tensor logits, int drawable, Tensor settings, Tensor? seen) -> Tensor");
}
TORCH_LIBRARY_IMPL(sluice, Meta, m) { m.impl("draw_tokens", meta); }
TORCH_LIBRARY_IMPL(sluice, Autograd, m) { m.impl("draw_tokens", torch::CppFunction::makeFallthrough()); }

}  // namespace sluice
