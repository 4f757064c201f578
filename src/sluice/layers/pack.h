// SPDX-License-Identifier: Apache-2.0
// The one layout of tokens: all sequences of a batch one behind the other. There is no padding and no mask tensor; a
// single sequence is a pack of one. What fills up a short pack on a GPU is one more sequence (train/batch.h).
#pragma once

#include <cstdint>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/kernels/rotary/rotary.h"
#include "sluice/layers/token_split.h"

namespace sluice {

// T tokens of N sequences. While sampling, sequence n continues what slot slots[n] of the layer states holds.
struct Pack {
  std::vector<std::int64_t> lengths;  // of the N sequences, in this pack; or bounds of them (filled_batch())
  std::vector<std::int64_t> past;     // tokens that each sequence's slot already holds; empty: none has any
  std::vector<std::int64_t> slots;    // rising; empty: no states
  Tensor cu_seqlens;                  // [N + 1] int32
  Tensor positions;                   // [T] int64: past + index within the sequence
  // With slots alone:
  Tensor slot_index = {};        // [N] int64: slots
  Tensor row_slots = {};         // [T] int64: the slot of each token
  Tensor seen = {};              // [N] int32: past + length
  std::int64_t longest() const;  // of `lengths`
};

// The values as a tensor on `device`, where the host need not wait for them.
Tensor int64s(const std::vector<std::int64_t>& values, at::Device device);
Tensor int32s(const std::vector<std::int64_t>& values, at::Device device);

// [n + 1] int32 on `device`: 0, then the end of each of these lengths.
Tensor cu_seqlens_of(const std::vector<std::int64_t>& lengths, at::Device device);

// A training pack, or with `past` and `slots` one that continues cached sequences; its tensors on `device`.
Pack make_pack(std::vector<std::int64_t> lengths, std::vector<std::int64_t> past = {},
               std::vector<std::int64_t> slots = {}, at::Device device = at::kCPU);

struct RouterLoad;   // layers/experts.h
class ChoiceRecord;  // layers/choices.h

// Where the choices of a forward pass are kept, or taken from; null: neither.
struct Replay {
  ChoiceRecord* experts = nullptr;     // of routers
  ChoiceRecord* key_blocks = nullptr;  // of indexers
};

// What every block of one forward pass shares. Pack, tokens and rotary table are of all tokens, whichever this rank
// works on.
struct ForwardContext {
  const Pack& pack;
  Tensor tokens = {};                    // [T] int64, as the embedding takes them
  RotaryTable rotary;                    // cos and sin for pack.positions; undefined for a model without rotary layers
  RouterLoad* router_load = nullptr;     // where routers add what they did; none: nobody asks
  std::int64_t feed_forward_tokens = 0;  // most tokens that go through a feed-forward at once; 0: all
  Replay replay = {};
  std::int64_t block = 0;            // of the decoder, which this context is for
  std::int64_t first_token = 0;      // of the pack, in a part of a feed-forward's tokens
  const Mesh& mesh = one_process();  // whose groups the layers exchange tensors in
  TokenSplit split = {};             // of the pack over the mesh; of one process: not needed
};

// x [own tokens, ..] of every tensor rank, one after the other: [the context rank's tokens, ..].
Tensor gather_tokens(const Tensor& x, const ForwardContext& context);

// The sum over the tensor ranks of their x [the context rank's tokens, ..], of which each gets its own tokens.
Tensor scatter_tokens(const Tensor& x, const ForwardContext& context);

}  // namespace sluice
