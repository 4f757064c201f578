// SPDX-License-Identifier: Apache-2.0
// Decoding steps on a GPU without their hundreds of launches: a step of every sequence's newest token is recorded once
// for some numbers of sequences, and replayed.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "sluice/kernels/common/recorded_work.h"
#include "sluice/layers/choices.h"
#include "sluice/models/decoder.h"

namespace sluice {

// A sequence's newest token.
struct DecodeRow {
  std::int64_t token, slot, position;
};

class DecodeGraphs {
 public:
  // `decoder` is on a GPU and can be recorded (Decoder::is_recordable()); `capacity`: tokens of a slot. Both must
  // outlive this.
  DecodeGraphs(const Decoder& decoder, std::int64_t capacity);
  ~DecodeGraphs();

  struct Output {
    Tensor logits;         // [rows, V] float32, until the next step
    ChoiceRecord experts;  // kept with keep_experts
  };

  // One token of each row's sequence through the model; `state` goes on. A recorded step may have more rows than asked
  // for: those go to `spare_slot`, which no sequence has. States and weights must lie where they lay.
  Output step(std::span<const DecodeRow> rows, std::int64_t spare_slot, DecoderState& state, bool keep_experts);

  // True where the decoder's weights lie elsewhere than they did when the first step was recorded.
  bool are_stale() const;

 private:
  struct Step;
  std::unique_ptr<Step> record(std::int64_t rows, std::int64_t spare_slot, DecoderState& state,
                               bool keep_experts) const;

  const Decoder& decoder_;
  std::int64_t capacity_;
  std::vector<const void*> weights_;                                      // where they lay
  std::map<std::pair<std::int64_t, bool>, std::unique_ptr<Step>> steps_;  // by rows and keep_experts
};

// [n, V] float32 whatever the operands are, hidden [n, D] and head [V, D]: rounded to bfloat16, log-probabilities would
// be off by percents, and not those that training finds for the same tokens.
Tensor logits_of(const Tensor& hidden, const Tensor& head);

}  // namespace sluice
