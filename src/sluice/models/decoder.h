// SPDX-License-Identifier: Apache-2.0
// The decoder that every family declares: embedding, blocks, final norm, head. It trains and samples; sampling hands it
// the state of its mixers.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/layers/feed_forward.h"
#include "sluice/layers/linear.h"
#include "sluice/layers/mixer.h"
#include "sluice/layers/norms.h"

namespace sluice {

// A part under the name that checkpoints give it.
template <typename Part>
struct Named {
  std::string name;
  std::unique_ptr<Part> part;
};

// h += mixer(norm(h)); h += feed_forward(norm(h)).
struct BlockParts {
  Named<ZeroCenteredRmsNorm> mixer_norm;
  Named<Mixer> mixer;
  Named<ZeroCenteredRmsNorm> feed_forward_norm;
  Named<FeedForward> feed_forward;
};

struct RotaryParts {
  double theta;
  std::int64_t dim;  // the first `dim` of each head turn
};

// D hidden size, V vocabulary.
struct DecoderParts {
  std::int64_t vocab_size, hidden_size;
  double initializer_range;
  std::vector<BlockParts> blocks;
  std::unique_ptr<ZeroCenteredRmsNorm> final_norm;
  RotaryParts rotary;
  bool tie_word_embeddings;  // the embedding serves as head
};

class Block : public Module {
 public:
  explicit Block(BlockParts parts);
  Tensor forward(const Tensor& h, const ForwardContext& context, MixerState* state) const;  // [T, D] to [T, D]
  const Mixer& mixer() const { return mixer_; }
  const FeedForward& feed_forward() const { return feed_forward_; }

 private:
  ZeroCenteredRmsNorm& mixer_norm_;
  Mixer& mixer_;
  ZeroCenteredRmsNorm& feed_forward_norm_;
  FeedForward& feed_forward_;
};

// The mixers' states of a number of sampling slots.
struct DecoderState {
  std::vector<std::unique_ptr<MixerState>> layers;
  void clear(std::int64_t slot) {
    for (const auto& layer : layers) layer->clear(slot);
  }
};

enum class Recompute { kNone, kBlocks };  // what is computed again in the backward pass instead of being kept

class Decoder : public Module {
 public:
  explicit Decoder(DecoderParts parts);

  // tokens [T] int64 to hidden states after the final norm [T, D]. With a state, sequences continue their slots. The
  // routers of sparse layers add to `router_load` what they did, where it is given.
  Tensor forward(const Tensor& tokens, const Pack& pack, DecoderState* state = nullptr,
                 RouterLoad* router_load = nullptr) const;

  Tensor embed(const Tensor& tokens) const;    // [T] int64 to [T, D]
  RotaryTable rotary(const Pack& pack) const;  // for the pack's positions
  const Tensor& head() const;                  // [V, D]: logits = hidden head^T
  DecoderState new_state(std::int64_t slots, std::int64_t capacity) const;
  std::int64_t vocab_size() const { return vocab_size_; }
  at::Device device() const { return embed_tokens_.weight().device(); }  // where its weights are

  // Empty, or why this model cannot run on a GPU with activations in `dtype`.
  std::string why_not_on_gpu(at::ScalarType dtype) const;

  // Of a forward pass over sequences of these lengths, the head over `asked` tokens.
  Operations forward_operations(std::span<const std::int64_t> lengths, std::int64_t asked) const;
  double head_operations(std::int64_t asked) const;
  void set_recompute(Recompute recompute) { recompute_ = recompute; }

 private:
  std::int64_t vocab_size_, hidden_size_;
  RotaryParts rotary_parts_;
  Embedding& embed_tokens_;
  std::vector<Block*> blocks_;
  ZeroCenteredRmsNorm& norm_;
  Linear* lm_head_ = nullptr;  // none: tied
  Recompute recompute_ = Recompute::kNone;
};

}  // namespace sluice
