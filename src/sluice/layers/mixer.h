// SPDX-License-Identifier: Apache-2.0
// A token mixer: the part of a block that lets tokens see earlier ones. Linear attention and softmax attention are
// both.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "sluice/layers/operations.h"
#include "sluice/layers/pack.h"
#include "sluice/layers/parameter.h"

namespace sluice {

// What a mixer keeps of the sequences being sampled, for a fixed number of slots. Slots are independent.
class MixerState {
 public:
  virtual ~MixerState() = default;
  virtual void clear(const Tensor& slots) = 0;  // [n] int64 on the state's device: as before the first token

  // Each of `slots` [n] becomes as its slot of `from_slots` [n] of `from`, a state of the same mixer and perhaps this
  // one; those hold sequences of at most `tokens` tokens.
  virtual void copy(const Tensor& slots, const MixerState& from, const Tensor& from_slots, std::int64_t tokens) = 0;

 protected:
  // Rows of `to` [slots, ..] become rows of `from`.
  static void copy_rows(const Tensor& to, const Tensor& slots, const Tensor& from, const Tensor& from_slots) {
    to.index_put_({slots}, from.index_select(0, from_slots));
  }
};

class Mixer : public Module {
 public:
  // x [T, D] to [T, D]. With a state, each sequence continues its slot, and the slot is updated.
  virtual Tensor forward(const Tensor& x, const ForwardContext& context, MixerState* state) const = 0;

  // Room for `slots` sequences of at most `capacity` tokens each; `activations`: their dtype and device.
  virtual std::unique_ptr<MixerState> new_state(std::int64_t slots, std::int64_t capacity,
                                                const at::TensorOptions& activations) const = 0;

  // Empty, or why the kernels for GPUs do not serve this mixer with activations in `dtype`.
  virtual std::string why_not_on_gpu(at::ScalarType dtype) const = 0;

  // Whether the host does the same for each decoding step on a GPU, whatever tokens and positions are, and for each
  // training pass over packs of a shape: then both can be recorded (kernels/common/recorded_work.h).
  virtual bool is_recordable() const = 0;

  // Adds the operations of a forward pass over sequences of these lengths.
  virtual void count_operations(std::span<const std::int64_t> lengths, Operations& operations) const = 0;
};

}  // namespace sluice
