// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/decoder.h"

#include <algorithm>
#include <numeric>

#include "sluice/layers/experts.h"
#include "sluice/layers/lora.h"
#include "sluice/layers/recompute.h"

namespace sluice {
namespace {

// Where nothing is kept for a backward pass. Ten experts of width 640 a token hold 400 MiB of so many tokens in
// bfloat16, and each of 512 experts still gets 160 of them.
constexpr std::int64_t kFeedForwardTokens = 8192;

// block.forward(h, context) without a state, whose inner activations are computed again in the backward pass.
Tensor recomputed_block(const Block& block, const Tensor& h, const ForwardContext& context) {
  std::vector<Tensor> parameters;
  for (const auto* parameter : trained_parameters(block.parameters())) parameters.push_back(parameter->value);
  // The backward pass may come after the caller's pack is gone: the function holds its own.
  const auto again = [&block, pack = context.pack, tokens = context.tokens, rotary = context.rotary,
                      routed = context.router_load != nullptr, replay = context.replay, number = context.block,
                      &mesh = context.mesh, split = context.split](const Tensor& x) {
    RouterLoad load;
    std::vector<Tensor> outputs{block.forward(x,
                                              {.pack = pack,
                                               .tokens = tokens,
                                               .rotary = rotary,
                                               .router_load = routed ? &load : nullptr,
                                               .replay = replay,
                                               .block = number,
                                               .mesh = mesh,
                                               .split = split},
                                              nullptr)};
    if (load.visits.defined()) outputs.insert(outputs.end(), {load.visits, load.probability});
    return outputs;
  };
  const auto outputs = recompute(again, h, parameters);
  if (outputs.size() > 1) {
    context.router_load->add({.rows = h.size(0), .visits = outputs[1], .probability = outputs[2]});
  }
  return outputs[0];
}

}  // namespace

Block::Block(BlockParts parts)
    : per_layer_embedding_(parts.per_layer_embedding
                               ? &add(parts.per_layer_embedding->name, std::move(parts.per_layer_embedding->part))
                               : nullptr),
      mixer_residual_(add(parts.mixer_residual.name, std::move(parts.mixer_residual.part))),
      mixer_(add(parts.mixer.name, std::move(parts.mixer.part))),
      feed_forward_residual_(add(parts.feed_forward_residual.name, std::move(parts.feed_forward_residual.part))),
      feed_forward_(add(parts.feed_forward.name, std::move(parts.feed_forward.part))) {}

Tensor Block::forward(const Tensor& residual, const ForwardContext& context, const BlockState* state) const {
  auto h = residual;
  if (per_layer_embedding_ != nullptr) {
    h = h + per_layer_embedding_->forward(h, context, state ? state->per_layer_embedding.get() : nullptr);
  }
  h = mixer_residual_.around(
      h, [&](const Tensor& x) { return mixer_.forward(x, context, state ? state->mixer.get() : nullptr); });
  return feed_forward_residual_.around(h, [&](const Tensor& x) { return feed_forward_.forward_in_parts(x, context); });
}

BlockState Block::new_state(std::int64_t slots, std::int64_t capacity, const at::TensorOptions& activations) const {
  BlockState state{.mixer = mixer_.new_state(slots, capacity, activations), .per_layer_embedding = nullptr};
  if (per_layer_embedding_ != nullptr) {
    state.per_layer_embedding = per_layer_embedding_->new_state(slots, capacity, activations);
  }
  return state;
}

std::string Block::why_not_on_gpu(at::ScalarType dtype) const {
  if (auto reason = mixer_.why_not_on_gpu(dtype); !reason.empty()) return reason;
  return feed_forward_.why_not_on_gpu();
}

bool Block::is_recordable() const {
  return mixer_.is_recordable() && (per_layer_embedding_ == nullptr || per_layer_embedding_->is_recordable());
}

void Block::count_operations(std::span<const std::int64_t> lengths, Operations& operations) const {
  const auto tokens = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  if (per_layer_embedding_ != nullptr) per_layer_embedding_->count_operations(lengths, operations);
  mixer_residual_.count_operations(tokens, operations);
  mixer_.count_operations(lengths, operations);
  feed_forward_residual_.count_operations(tokens, operations);
  feed_forward_.count_operations(tokens, operations);
}

Decoder::Decoder(DecoderParts parts)
    : vocab_size_(parts.vocab_size),
      hidden_size_(parts.hidden_size),
      streams_(parts.streams),
      rotary_parts_(parts.rotary),
      embed_tokens_(add("model.embed_tokens",
                        std::make_unique<Embedding>(parts.vocab_size, parts.hidden_size, parts.initializer_range))),
      blocks_([&] {
        std::vector<Block*> blocks;
        for (auto& block : parts.blocks) {
          blocks.push_back(
              &add("model.layers." + std::to_string(blocks.size()), std::make_unique<Block>(std::move(block))));
        }
        return blocks;
      }()),
      output_(add("model." + parts.output.name, std::move(parts.output.part))) {
  if (!parts.tie_word_embeddings) {
    lm_head_ =
        &add("lm_head", std::make_unique<Embedding>(parts.vocab_size, parts.hidden_size, parts.initializer_range));
  }
}

Tensor Decoder::forward(const Tensor& tokens, const Pack& pack, DecoderState* state, RouterLoad* router_load,
                        Tensor* residual, const Replay& replay) const {
  auto context = this->context(tokens, pack);
  context.router_load = router_load;
  context.replay = replay;
  // Ranks would have to agree on the parts.
  if (!at::GradMode::is_enabled() && mesh_->world().size() == 1) context.feed_forward_tokens = kFeedForwardTokens;
  auto h = embed(context);
  if (streams_ > 1) h = h.repeat({1, streams_});  // [T, R]
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    context.block = static_cast<std::int64_t>(i);
    if (recompute_ == Recompute::kBlocks && at::GradMode::is_enabled()) {
      h = recomputed_block(*blocks_[i], h, context);
    } else {
      h = blocks_[i]->forward(h, context, state == nullptr ? nullptr : &state->blocks[i]);
    }
  }
  if (residual != nullptr) *residual = h;
  return output_.read(h);
}

ForwardContext Decoder::context(const Tensor& tokens, const Pack& pack) const {
  return {.pack = pack,
          .tokens = tokens,
          .rotary = rotary_table(pack.positions, rotary_parts_.theta, rotary_parts_.dim),
          .mesh = *mesh_,
          .split = split_tokens(pack.lengths, *mesh_)};
}

Tensor Decoder::embed(const ForwardContext& context) const { return embed_tokens_.forward(context.tokens, context); }

const Tensor& Decoder::head() const { return lm_head_ == nullptr ? embed_tokens_.weight() : lm_head_->weight(); }

DecoderState Decoder::new_state(std::int64_t slots, std::int64_t capacity) const {
  DecoderState state;
  for (const auto* block : blocks_) {
    state.blocks.push_back(block->new_state(slots, capacity, embed_tokens_.weight().options()));
  }
  return state;
}

std::string Decoder::why_not_on_gpu(at::ScalarType dtype) const {
  for (const auto* block : blocks_) {
    if (auto reason = block->why_not_on_gpu(dtype); !reason.empty()) return reason;
  }
  return "";
}

bool Decoder::is_recordable() const {
  return std::ranges::all_of(blocks_, [](const auto* block) { return block->is_recordable(); });
}

Operations Decoder::forward_operations(std::span<const std::int64_t> lengths, std::int64_t asked) const {
  Operations operations;
  for (const auto* block : blocks_) block->count_operations(lengths, operations);
  output_.count_operations(std::accumulate(lengths.begin(), lengths.end(), 0.0), operations);
  operations["head"] = head_operations(asked);
  return operations;
}

double Decoder::head_operations(std::int64_t asked) const {
  return 2 * static_cast<double>(asked) * static_cast<double>(vocab_size_ * hidden_size_);
}

}  // namespace sluice
