// SPDX-License-Identifier: Apache-2.0
// On the CPU tokens are drawn one row at a time where they are sampled (sample/sampler.h), with buffers that live
// between calls; here the definition stands in.
#include "sluice/kernels/draw_tokens/draw_tokens.h"

namespace sluice {

TORCH_LIBRARY_IMPL(sluice, CPU, m) { m.impl("draw_tokens", draw_tokens_definition); }

}  // namespace sluice
