// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/decoder.h"

#include <numeric>

#include "sluice/layers/experts.h"
#include "sluice/layers/recompute.h"

namespace sluice {
namespace {

// block.forward(h, context) without a state, whose inner activations are computed again in the backward pass.
Tensor recomputed_block(const Block& block, const Tensor& h, const ForwardContext& context) {
  std::vector<Tensor> parameters;
  for (const auto* parameter : block.parameters()) parameters.push_back(parameter->value);
  // The backward pass may come after the caller's pack is gone: the function holds its own.
  const auto again = [&block, pack = context.pack, rotary = context.rotary,
                      routed = context.router_load != nullptr](const Tensor& x) {
    RouterLoad load;
    std::vector<Tensor> outputs{
        block.forward(x, {.pack = pack, .rotary = rotary, .router_load = routed ? &load : nullptr}, nullptr)};
    if (load.rows > 0) outputs.insert(outputs.end(), {load.visits, load.probability});
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
    : mixer_norm_(add(parts.mixer_norm.name, std::move(parts.mixer_norm.part))),
      mixer_(add(parts.mixer.name, std::move(parts.mixer.part))),
      feed_forward_norm_(add(parts.feed_forward_norm.name, std::move(parts.feed_forward_norm.part))),
      feed_forward_(add(parts.feed_forward.name, std::move(parts.feed_forward.part))) {}

Tensor Block::forward(const Tensor& h, const ForwardContext& context, MixerState* state) const {
  const auto mixed = h + mixer_.forward(mixer_norm_.forward(h), context, state);
  return mixed + feed_forward_.forward(feed_forward_norm_.forward(mixed), context);
}

Decoder::Decoder(DecoderParts parts)
    : vocab_size_(parts.vocab_size),
      hidden_size_(parts.hidden_size),
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
      norm_(add("model.norm", std::move(parts.final_norm))) {
  if (!parts.tie_word_embeddings) {
    lm_head_ = &add("lm_head", std::make_unique<Linear>(parts.vocab_size, parts.hidden_size, parts.initializer_range));
  }
}

Tensor Decoder::forward(const Tensor& tokens, const Pack& pack, DecoderState* state, RouterLoad* router_load) const {
  const ForwardContext context{.pack = pack, .rotary = rotary(pack), .router_load = router_load};
  auto h = embed(tokens);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (recompute_ == Recompute::kBlocks && at::GradMode::is_enabled()) {
      h = recomputed_block(*blocks_[i], h, context);
    } else {
      h = blocks_[i]->forward(h, context, state == nullptr ? nullptr : state->layers[i].get());
    }
  }
  return norm_.forward(h);
}

Tensor Decoder::embed(const Tensor& tokens) const { return embed_tokens_.forward(tokens); }

RotaryTable Decoder::rotary(const Pack& pack) const {
  return rotary_table(pack.positions, rotary_parts_.theta, rotary_parts_.dim);
}

const Tensor& Decoder::head() const { return lm_head_ == nullptr ? embed_tokens_.weight() : lm_head_->weight(); }

DecoderState Decoder::new_state(std::int64_t slots, std::int64_t capacity) const {
  DecoderState state;
  for (const auto* block : blocks_) {
    state.layers.push_back(block->mixer().new_state(slots, capacity, embed_tokens_.weight().options()));
  }
  return state;
}

std::string Decoder::why_not_on_gpu(at::ScalarType dtype) const {
  for (const auto* block : blocks_) {
    if (auto reason = block->mixer().why_not_on_gpu(dtype); !reason.empty()) return reason;
    if (auto reason = block->feed_forward().why_not_on_gpu(); !reason.empty()) return reason;
  }
  return "";
}

Operations Decoder::forward_operations(std::span<const std::int64_t> lengths, std::int64_t asked) const {
  Operations operations;
  const auto tokens = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  for (const auto* block : blocks_) {
    block->mixer().count_operations(lengths, operations);
    block->feed_forward().count_operations(tokens, operations);
  }
  operations["head"] = head_operations(asked);
  return operations;
}

double Decoder::head_operations(std::int64_t asked) const {
  return 2 * static_cast<double>(asked) * static_cast<double>(vocab_size_ * hidden_size_);
}

}  // namespace sluice
