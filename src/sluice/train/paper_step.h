// SPDX-License-Identifier: Apache-2.0
// A step of a training run on tensors without storage (PyTorch's meta device): the program's own forward and backward
// pass, of any rank of any mesh. What it holds, computes and exchanges can be counted before anything is loaded.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "sluice/layers/lora.h"
#include "sluice/models/family.h"
#include "sluice/train/gradient_sum.h"
#include "sluice/train/offload.h"
#include "sluice/train/options.h"
#include "sluice/train/step.h"

namespace sluice {

struct PlannedRun {
  at::ScalarType dtype;          // of parameters and activations
  std::int64_t seq_len;          // tokens of a row: one sequence, each of its tokens trained
  std::int64_t tokens_per_step;  // in rows of seq_len, whose gradients are summed
  MtpTraining mtp = MtpTraining::kOff;
  GradientSum::Kept gradients = GradientSum::Kept::kHeld;
  Offload offload = Offload::kOff;
  bool recompute = false;
  const Mesh& mesh = one_process();  // on paper: the plan is of its rank

  std::int64_t rows_of_rank() const {
    const auto rows = (tokens_per_step + seq_len - 1) / seq_len, dp = mesh.sizes().dp;
    return (rows + dp - 1) / dp;
  }
};

// A row of one sequence, every token of which but the last has a target.
PackedBatch full_row(std::int64_t tokens);

// While it lives, counts what tensors of the meta device would take.
class MetaMemory : public c10::Allocator {
 public:
  MetaMemory();
  ~MetaMemory() override;
  MetaMemory(const MetaMemory&) = delete;  // tensors know it by address
  MetaMemory& operator=(const MetaMemory&) = delete;

  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void*, const void*, std::size_t) const override {}

  std::int64_t live() const { return bytes_->live; }
  std::int64_t peak() const { return bytes_->peak; }
  std::int64_t allocated() const { return bytes_->allocated; }  // in all, also of tensors that are gone

 private:
  struct Bytes {
    std::atomic<std::int64_t> live = 0, peak = 0, allocated = 0;  // autograd may free on a thread of its own
  };
  struct Block {
    std::shared_ptr<Bytes> counted;  // a tensor may outlive the count
    std::int64_t size;
  };
  static void free_block(void* context);

  c10::Allocator* before_;
  std::shared_ptr<Bytes> bytes_ = std::make_shared<Bytes>();
};

// The model on paper. It must have been built and not loaded; adapters are declared before. Its parameters get values
// without storage, of the rank's pieces; while this lives, it works on the run's mesh.
class PaperStep {
 public:
  PaperStep(const Model& model, const PlannedRun& run);
  ~PaperStep();
  PaperStep(const PaperStep&) = delete;
  PaperStep& operator=(const PaperStep&) = delete;

  const std::vector<Parameter*>& held() const { return held_; }        // the model's, and its adapters'
  const std::vector<Parameter*>& trained() const { return trained_; }  // of those
  Objective objective() const;
  // The gradients of so many rows of each data rank.
  void add_gradients(GradientSum& gradients, std::int64_t rows) const;

 private:
  const Model& model_;
  const PlannedRun& run_;
  std::vector<Parameter*> held_, trained_;
  mutable LoraDropout no_dropout_;  // says that adapters are trained
};

}  // namespace sluice
