// SPDX-License-Identifier: Apache-2.0
// Drawing on CUDA tensors: from tensors to params to launch.
#include <optional>

#include "sluice/kernels/common/launch.h"
#include "sluice/kernels/draw_tokens/inputs.h"
#include "sluice/kernels/draw_tokens/params.h"

namespace sluice {
namespace {

constexpr auto kOp = "draw_tokens";

Tensor draw_tokens_cuda(const Tensor& logits, std::int64_t drawable, const Tensor& settings,
                        const std::optional<Tensor>& seen) {
  const c10::cuda::CUDAGuard device(logits.device());
  check_draw_tokens(logits, drawable, settings, seen);
  check_device(kOp, "settings", settings, logits);
  if (seen) check_device(kOp, "seen", *seen, logits);
  SLUICE_CHECK(logits.size(1) <= kDrawTokensMostIds && logits.size(0) <= kDrawTokensMostRows, "{}: too many logits: {}",
               kOp, describe(logits));
  const auto rows = with_dense_rows(logits), how = settings.contiguous();
  const auto marks = seen ? seen->contiguous() : Tensor();
  const auto drawn = at::empty({logits.size(0), kDrawnToken}, settings.options());
  DrawTokensParams params{};
  params.logits = rows.const_data_ptr();
  params.row_stride = rows.stride(0);
  params.settings = static_cast<const DrawSettings*>(how.const_data_ptr());
  params.seen = seen ? marks.const_data_ptr<bool>() : nullptr;
  params.rows = static_cast<std::int32_t>(logits.size(0));
  params.vocabulary = static_cast<std::int32_t>(logits.size(1));
  params.drawable = static_cast<std::int32_t>(drawable);
  params.bfloat16 = is_bfloat16(kOp, "logits", logits);
  params.drawn = static_cast<DrawnToken*>(drawn.mutable_data_ptr());
  check_launch(kOp, launch_draw_tokens(params, c10::cuda::getCurrentCUDAStream()));
  return drawn;
}

TORCH_LIBRARY_IMPL(sluice, CUDA, m) { m.impl("draw_tokens", draw_tokens_cuda); }

}  // namespace
}  // namespace sluice
