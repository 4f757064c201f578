// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/paper_step.h"

#include <ATen/ExpandUtils.h>

#include <algorithm>

#include "sluice/train/setup.h"

namespace sluice {
namespace {

const auto kMetaOptions = at::TensorOptions().device(at::kMeta);

// libtorch has these without storage in Python alone.
Tensor index_select_meta(const Tensor& x, std::int64_t dim, const Tensor& index) {
  auto sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim < 0 ? dim + x.dim() : dim)] = index.numel();
  return at::empty(sizes, x.options());
}
Tensor embedding_dense_backward_meta(const Tensor& grad, const Tensor&, std::int64_t rows, std::int64_t, bool) {
  return at::empty({rows, grad.size(-1)}, grad.options());
}
Tensor abs_meta(const Tensor& x) { return at::empty_like(x); }
Tensor where_meta(const Tensor& condition, const Tensor& x, const Tensor& y) {
  return at::empty(at::infer_size(at::infer_size(x.sizes(), y.sizes()), condition.sizes()),
                   kMetaOptions.dtype(at::result_type(x, y)));
}
Tensor roll_meta(const Tensor& x, at::IntArrayRef, at::IntArrayRef) { return at::empty_like(x); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("index_select", index_select_meta);
  m.impl("embedding_dense_backward", embedding_dense_backward_meta);
  m.impl("abs", abs_meta);
  m.impl("where.self", where_meta);
  m.impl("roll", roll_meta);
}

PackedBatch full_row(std::int64_t tokens) {
  const auto count = static_cast<std::size_t>(tokens);
  PackedBatch row{.tokens = std::vector<TokenId>(count),
                  .cu_seqlens = {0, static_cast<std::int32_t>(tokens)},
                  .targets = std::vector<std::int32_t>(count),
                  .loss_weight = std::vector<float>(count, 1.0F),
                  .samples = {0}};
  row.targets.back() = kIgnoredTarget;
  row.loss_weight.back() = 0;
  return row;
}

MetaMemory::MetaMemory() : before_(c10::GetAllocator(at::kMeta)) { c10::SetAllocator(at::kMeta, this); }

MetaMemory::~MetaMemory() { c10::SetAllocator(at::kMeta, before_); }

c10::DataPtr MetaMemory::allocate(std::size_t bytes) {
  const auto size = static_cast<std::int64_t>(bytes);
  const auto live = bytes_->live += size;
  bytes_->peak = std::max(bytes_->peak.load(), live);
  bytes_->allocated += size;
  return {nullptr, new Block{bytes_, size}, free_block, at::kMeta};
}

void MetaMemory::free_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->counted->live -= block->size;
}

PaperStep::PaperStep(const Model& model, const PlannedRun& run)
    : model_(model), run_(run), held_(model.parameters()), trained_(trained_parameters(model, run.mtp)) {
  const auto adapters = lora_parameters(held_);
  held_.insert(held_.end(), adapters.begin(), adapters.end());
  for (auto* parameter : held_) {
    const auto dtype = held_dtype(*parameter, run.dtype);
    parameter->value = at::empty(local_shape(*parameter, place_of(run.mesh)), kMetaOptions.dtype(dtype));
  }
  for (auto* parameter : trained_) parameter->value.requires_grad_();
  model.decoder->set_mesh(run.mesh);
  model.decoder->set_recompute(run.recompute ? Recompute::kBlocks : Recompute::kNone);
}

PaperStep::~PaperStep() { model_.decoder->set_mesh(one_process()); }

Objective PaperStep::objective() const {
  const bool adapted =
      std::ranges::any_of(held_, [](const Parameter* parameter) { return parameter->adapter != nullptr; });
  return {.decoder = *model_.decoder,
          .router_aux_loss_coef = model_.router_aux_loss_coef,
          .mtp = model_.mtp.get(),
          .mtp_loss_scale = 1,
          .mtp_only = run_.mtp == MtpTraining::kOnly,
          .adapters = adapted ? &no_dropout_ : nullptr};
}

void PaperStep::add_gradients(GradientSum& gradients, std::int64_t rows) const {
  const std::vector packs(static_cast<std::size_t>(rows * run_.mesh.sizes().dp), full_row(run_.seq_len));
  sluice::add_gradients(objective(), packs, gradients);
}

}  // namespace sluice
