// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/memory_plan.h"

#include <ATen/ExpandUtils.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "sluice/layers/lora.h"
#include "sluice/train/adamw.h"
#include "sluice/train/setup.h"
#include "sluice/train/step.h"

namespace sluice {
namespace {

// While it lives, counts what tensors of the meta device would take.
class MetaMemory : public c10::Allocator {
 public:
  MetaMemory() : before_(c10::GetAllocator(at::kMeta)) { c10::SetAllocator(at::kMeta, this); }
  ~MetaMemory() override { c10::SetAllocator(at::kMeta, before_); }
  MetaMemory(const MetaMemory&) = delete;  // tensors know it by address
  MetaMemory& operator=(const MetaMemory&) = delete;

  c10::DataPtr allocate(std::size_t bytes) override {
    const auto size = static_cast<std::int64_t>(bytes);
    const auto live = bytes_->live += size;
    bytes_->peak = std::max(bytes_->peak.load(), live);
    return {nullptr, new Block{bytes_, size}, free_block, at::kMeta};
  }
  void copy_data(void*, const void*, std::size_t) const override {}

  std::int64_t live() const { return bytes_->live; }
  std::int64_t peak() const { return bytes_->peak; }

 private:
  struct Bytes {
    std::atomic<std::int64_t> live = 0, peak = 0;  // autograd may free on a thread of its own
  };
  struct Block {
    std::shared_ptr<Bytes> counted;  // a tensor may outlive the count
    std::int64_t size;
  };
  static void free_block(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->counted->live -= block->size;
  }

  c10::Allocator* before_;
  std::shared_ptr<Bytes> bytes_ = std::make_shared<Bytes>();
};

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

// A row of one sequence, every token of which but the last has a target.
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

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("index_select", index_select_meta);
  m.impl("embedding_dense_backward", embedding_dense_backward_meta);
  m.impl("abs", abs_meta);
  m.impl("where.self", where_meta);
  m.impl("roll", roll_meta);
}

TrainingMemory plan_training(const Model& model, const PlannedRun& run) {
  TrainingMemory memory{};
  auto all = model.parameters();
  const auto adapters = lora_parameters(all);
  all.insert(all.end(), adapters.begin(), adapters.end());
  for (auto* parameter : all) {
    const auto dtype = held_dtype(*parameter, run.dtype);
    parameter->value = at::empty(local_shape(*parameter, place_of(run.mesh)), kMetaOptions.dtype(dtype));
    (parameter->as_stored ? memory.mapped : memory.parameters) += static_cast<std::int64_t>(parameter->value.nbytes());
  }
  const auto trained = trained_parameters(model, run.mtp);
  constexpr std::int64_t kFloatBytes = 4;
  const Shards shards(trained, run.mesh);
  for (std::size_t i = 0; i < trained.size(); ++i) {
    const auto& value = trained[i]->value.requires_grad_();
    const auto own = shards.own_rows(i, value.detach()).numel() * kFloatBytes;
    memory.optimizer += value.scalar_type() == kFloat ? 2 * own : 3 * own;
    memory.checkpoint_copy += 3 * own;
  }
  model.decoder->set_mesh(run.mesh);
  const MetaMemory counted;
  GradientSum gradients(trained, run.mesh);
  const auto rows = (run.tokens_per_step + run.seq_len - 1) / run.seq_len, dp = run.mesh.sizes().dp;
  const auto own_rows = std::min<std::int64_t>((rows + dp - 1) / dp, 2);  // a third is as the second
  const std::vector packs(static_cast<std::size_t>(own_rows * dp), full_row(run.seq_len));
  add_gradients({.decoder = *model.decoder,
                 .router_aux_loss_coef = model.router_aux_loss_coef,
                 .mtp = model.mtp.get(),
                 .mtp_loss_scale = 1,
                 .mtp_only = run.mtp == MtpTraining::kOnly},
                packs, gradients);
  model.decoder->set_mesh(one_process());
  memory.gradients = counted.live();
  memory.activations = counted.peak() - memory.gradients;
  return memory;
}

std::int64_t plan_states(const Decoder& decoder, std::int64_t slots, std::int64_t capacity) {
  const MetaMemory counted;
  const auto state = decoder.new_state(slots, capacity);
  return counted.live();
}

}  // namespace sluice
