// SPDX-License-Identifier: Apache-2.0
// The decoder that every family declares: embedding, blocks around a residual, head. It trains and samples; sampling
// hands it the state of its mixers.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/layers/feed_forward.h"
#include "sluice/layers/linear.h"
#include "sluice/layers/mixer.h"
#include "sluice/layers/residual.h"

namespace sluice {

// A part under the name that checkpoints give it.
template <typename Part>
struct Named {
  std::string name;
  std::unique_ptr<Part> part;
};

// h += per_layer_embedding(h), where there is one; then mixer and feed-forward, each through its residual.
struct BlockParts {
  Named<Residual> mixer_residual;
  Named<Mixer> mixer;
  Named<Residual> feed_forward_residual;
  Named<FeedForward> feed_forward;
  std::optional<Named<Mixer>> per_layer_embedding = {};  // of the residual's width: [T, R] to [T, R]
};

struct RotaryParts {
  double theta;
  std::int64_t dim;  // the first `dim` of each head turn
};

// D hidden size, V vocabulary. The residual is [T, R], R = streams * D, and begins as the embedding in every stream.
struct DecoderParts {
  std::int64_t vocab_size, hidden_size;
  double initializer_range;
  std::vector<BlockParts> blocks;
  Named<Residual> output;  // what the head reads
  RotaryParts rotary;
  bool tie_word_embeddings;  // the embedding serves as head
  std::int64_t streams = 1;
};

// What a block keeps of the sequences being sampled.
struct BlockState {
  std::unique_ptr<MixerState> mixer, per_layer_embedding;  // the second only where the block has such a part
};

class Block : public Module {
 public:
  explicit Block(BlockParts parts);
  Tensor forward(const Tensor& residual, const ForwardContext& context, const BlockState* state) const;  // [T, R]
  BlockState new_state(std::int64_t slots, std::int64_t capacity, const at::TensorOptions& activations) const;
  std::string why_not_on_gpu(at::ScalarType dtype) const;
  bool is_recordable() const;
  void count_operations(std::span<const std::int64_t> lengths, Operations& operations) const;

 private:
  Mixer* per_layer_embedding_;  // none: null
  Residual& mixer_residual_;
  Mixer& mixer_;
  Residual& feed_forward_residual_;
  FeedForward& feed_forward_;
};

// The blocks' states of a number of sampling slots.
struct DecoderState {
  std::vector<BlockState> blocks;
  void clear(const Tensor& slots) {  // as MixerState::clear
    for (const auto& block : blocks) {
      block.mixer->clear(slots);
      if (block.per_layer_embedding) block.per_layer_embedding->clear(slots);
    }
  }
  void copy(const Tensor& slots, const DecoderState& from, const Tensor& from_slots, std::int64_t tokens) {  // likewise
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const auto &to = blocks[i], &other = from.blocks[i];
      to.mixer->copy(slots, *other.mixer, from_slots, tokens);
      if (to.per_layer_embedding) to.per_layer_embedding->copy(slots, *other.per_layer_embedding, from_slots, tokens);
    }
  }
};

enum class Recompute { kNone, kBlocks };  // what is computed again in the backward pass instead of being kept

class Decoder : public Module {
 public:
  explicit Decoder(DecoderParts parts);

  // tokens [T] int64 to the hidden states [T, D] that the head reads. With a state, sequences continue their slots. The
  // routers of sparse layers add to `router_load` what they did; choices are kept or taken as `replay` says; `residual`
  // becomes the residual [T, R] after the last block. A rank of a mesh is given all tokens of its pack, and gives the
  // rows of its own (split()); states and replay are for one process.
  Tensor forward(const Tensor& tokens, const Pack& pack, DecoderState* state = nullptr,
                 RouterLoad* router_load = nullptr, Tensor* residual = nullptr, const Replay& replay = {}) const;

  // What a pass over the pack's tokens shares.
  ForwardContext context(const Tensor& tokens, const Pack& pack) const;
  Tensor embed(const ForwardContext& context) const;  // its tokens to [T, D], of a rank the own ones
  const Tensor& head() const;                         // [V, D]: logits = hidden head^T; of a tensor rank its rows
  DecoderState new_state(std::int64_t slots, std::int64_t capacity) const;
  std::int64_t vocab_size() const { return vocab_size_; }
  std::int64_t num_blocks() const { return static_cast<std::int64_t>(blocks_.size()); }
  at::Device device() const { return embed_tokens_.weight().device(); }  // where its weights are

  // Empty, or why this model cannot run on a GPU with activations in `dtype`.
  std::string why_not_on_gpu(at::ScalarType dtype) const;

  // Whether a decoding step on a GPU, and a training pass, can be recorded (kernels/common/recorded_work.h).
  bool is_recordable() const;

  // Of a forward pass over sequences of these lengths, the head over `asked` tokens.
  Operations forward_operations(std::span<const std::int64_t> lengths, std::int64_t asked) const;
  double head_operations(std::int64_t asked) const;
  void set_recompute(Recompute recompute) { recompute_ = recompute; }

  // The ranks among which layers are split; the parameters' values must be this rank's pieces. The mesh must outlive
  // the decoder.
  void set_mesh(const Mesh& mesh) { mesh_ = &mesh; }
  const Mesh& mesh() const { return *mesh_; }

 private:
  std::int64_t vocab_size_, hidden_size_, streams_;
  RotaryParts rotary_parts_;
  Embedding& embed_tokens_;
  std::vector<Block*> blocks_;
  Residual& output_;
  Embedding* lm_head_ = nullptr;  // none: tied
  Recompute recompute_ = Recompute::kNone;
  const Mesh* mesh_ = &one_process();
};

}  // namespace sluice
