// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/decode_graphs.h"

#include <bit>

#include "sluice/kernels/common/matmul.h"
#include "sluice/layers/lora.h"

namespace sluice {

struct DecodeGraphs::Step {
  Tensor input;  // [3, rows] int64: token, slot and position of each
  Output output;
  std::unique_ptr<RecordedWork> work;
};

namespace {

// One token of each of input's rows. Nothing but the number of rows is known to the host.
Pack pack_of(const Tensor& input, std::int64_t capacity) {
  const auto rows = static_cast<std::size_t>(input.size(1));
  const auto slot = input.select(0, 1), position = input.select(0, 2);
  return {.lengths = std::vector<std::int64_t>(rows, 1),
          .past = std::vector<std::int64_t>(rows, capacity - 1),  // at most
          .slots = std::vector<std::int64_t>(rows, 0),
          .cu_seqlens = at::arange(input.size(1) + 1, input.options().dtype(kInt)),
          .positions = position,
          .slot_index = slot,
          .row_slots = slot,
          .seen = (position + 1).to(kInt)};
}

}  // namespace

DecodeGraphs::DecodeGraphs(const Decoder& decoder, std::int64_t capacity) : decoder_(decoder), capacity_(capacity) {}

DecodeGraphs::~DecodeGraphs() = default;

std::unique_ptr<DecodeGraphs::Step> DecodeGraphs::record(std::int64_t rows, std::int64_t spare_slot,
                                                         DecoderState& state, bool keep_experts) const {
  auto step = std::make_unique<Step>();
  step->input = at::zeros({3, rows}, at::TensorOptions().dtype(kLong).device(decoder_.device()));
  step->input.select(0, 1).fill_(spare_slot);
  step->work = record_work(decoder_.device(), [&] {
    step->output = {};
    const auto hidden =
        decoder_.forward(step->input.select(0, 0), pack_of(step->input, capacity_), &state, /*router_load=*/nullptr,
                         /*residual=*/nullptr, {.experts = keep_experts ? &step->output.experts : nullptr});
    step->output.logits = logits_of(hidden, decoder_.head());
  });
  return step;
}

DecodeGraphs::Output DecodeGraphs::step(std::span<const DecodeRow> rows, std::int64_t spare_slot, DecoderState& state,
                                        bool keep_experts) {
  const auto recorded = static_cast<std::int64_t>(std::bit_ceil(rows.size()));
  auto& step = steps_[{recorded, keep_experts}];
  if (step == nullptr) {
    if (weights_.empty()) weights_ = addresses(decoder_.parameters());
    step = record(recorded, spare_slot, state, keep_experts);
  }
  auto input = at::zeros({3, recorded}, kLong);
  input.select(0, 1).fill_(spare_slot);
  auto values = input.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    values[0][i] = rows[i].token;
    values[1][i] = rows[i].slot;
    values[2][i] = rows[i].position;
  }
  step->input.copy_(input);
  step->work->replay();
  auto output = step->output;
  output.logits = output.logits.narrow(0, 0, static_cast<std::int64_t>(rows.size()));
  return output;
}

bool DecodeGraphs::are_stale() const { return !weights_.empty() && weights_ != addresses(decoder_.parameters()); }

Tensor logits_of(const Tensor& hidden, const Tensor& head) {
  auto logits = at::empty({hidden.size(0), head.size(0)}, hidden.options().dtype(kFloat));
  if (hidden.is_cpu()) {  // few rows: they are packed, and the head read as it lies
    matmul_into(logits.t(), head, hidden.t(), /*accumulate=*/false);
  } else if (hidden.scalar_type() == kFloat) {
    at::mm_out(logits, hidden, head.t());
  } else {
    at::mm_out(logits, hidden, head.t(), kFloat);
  }
  return logits;
}

}  // namespace sluice
