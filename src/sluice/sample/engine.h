// SPDX-License-Identifier: Apache-2.0
// Samples many sequences together (continuous batching, Yu et al. 2022, "Orca"). Each running sequence owns a slot of
// the decoder's state. One step is one forward pass over one pack: the newest token of every sequence that is decoding,
// and pieces of prompts as far as the step's token budget goes. A sequence that ends leaves its slot to the next one
// waiting. Requests with one prompt that come one after the other, as the samples of a group do, share its way through
// the model: one of them takes it, and the others copy what its slot then holds.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/layers/choices.h"
#include "sluice/models/decoder.h"
#include "sluice/sample/decode_graphs.h"
#include "sluice/sample/sampler.h"
#include "sluice/sample/stop.h"

namespace sluice {

enum class FinishReason { kStop, kLength };  // a stop id or stop string; max_tokens

struct Completion {
  std::vector<TokenId> tokens;        // as sampled, a stop id included
  std::vector<float> logprobs;        // of each token under the distribution that it was drawn from
  std::vector<float> model_logprobs;  // of each token under the model (SampledToken)
  // Where the request asks for it: what the model chose for each token that went through it, prompt included, so all
  // but the last one sampled. Of key blocks -1 follows the last one; a token that attends to all that it sees may have
  // none.
  Choices experts, key_blocks;
  std::string text;  // without special tokens and stop id, cut before a stop string
  FinishReason finish_reason = FinishReason::kLength;
};

struct GenerationRequest {
  std::vector<TokenId> prompt;  // at least one id
  std::int64_t max_tokens;      // at least 1
  SamplingParameters sampling;
  std::vector<std::string> stop;  // texts that end the answer
  bool keep_experts = false, keep_key_blocks = false;
  // After the answer its slot keeps what it holds until another sequence needs the slot. A request whose prompt goes on
  // behind prompt and answer of such a one takes that slot, the longest one's, and only the rest of its prompt goes
  // through the model.
  bool keep_state = false;
  std::function<void(std::string_view piece)>
      on_text;                                       // may be empty; whole UTF-8 characters, joined they are the text
  std::function<void(const Completion&)> on_finish;  // may be empty
};

struct EngineSizes {
  std::int64_t slots;                  // sequences at once
  std::int64_t capacity;               // tokens of one sequence: prompt and answer
  std::int64_t tokens_per_step = 512;  // of one forward pass; at least `slots`
};

class Engine {
 public:
  // `decoder` must outlive the engine; its weights may change between steps only while nothing runs and no state is
  // kept. Ids that the tokenizer lacks are never drawn. `stop_ids` end every sequence.
  Engine(const Decoder& decoder, Tokenizer tokenizer, std::vector<TokenId> stop_ids, const EngineSizes& sizes);

  ~Engine();

  // Puts a request at the end of the queue. Usage error for parameters out of range, data error for an empty prompt, an
  // id outside the vocabulary, or a length over the capacity.
  void submit(GenerationRequest request);

  // One forward pass and the tokens that it gives. False: nothing is running or waiting.
  bool step();

  void run() {
    while (step()) {
    }
  }

  // Ids that can be drawn: those below this one.
  std::int64_t drawable() const { return std::min(tokenizer_.vocab_size(), decoder_.vocab_size()); }

  // Gives the memory of the layers' states, kept ones too, and of recorded steps back. The next step() makes them anew,
  // so nothing that older weights computed is left. Nothing may be running or waiting.
  void sleep();

 private:
  struct KeptChoices;
  struct SharedPrompt;
  struct Waiting {
    GenerationRequest request;
    std::shared_ptr<SharedPrompt> shared;  // null: no other request has its prompt
  };
  struct Sequence;
  struct StepPlan;  // what each slot puts into the pack of a step

  bool is_idle() const {
    return std::ranges::all_of(slots_, [](const auto& slot) { return slot == nullptr; });
  }
  bool records_steps() const { return decoder_.device().is_cuda() && decoder_.is_recordable(); }
  std::optional<std::size_t> longest_kept(const GenerationRequest& request) const;
  void continue_kept(std::size_t slot, GenerationRequest request);
  void admit();
  StepPlan plan() const;
  Tensor forward(const StepPlan& plan, const Replay& replay);
  Tensor run_model(const StepPlan& plan);
  void share(const std::shared_ptr<SharedPrompt>& prompt, std::size_t slot, const Tensor& logits) const;
  std::vector<std::size_t> follow();
  std::vector<SampledToken> draw(const Tensor& logits, std::span<const std::size_t> slots);
  bool asked_for(bool GenerationRequest::*kind, const StepPlan& plan) const;
  void accept(std::size_t slot, const SampledToken& token);
  void finish(std::size_t slot, FinishReason reason);

  const Decoder& decoder_;
  Tokenizer tokenizer_;
  std::vector<TokenId> stop_ids_;  // sorted
  EngineSizes sizes_;
  DecoderState state_;                    // without blocks: asleep
  std::unique_ptr<DecodeGraphs> graphs_;  // null: none was recorded yet
  Sampler sampler_;                       // of the CPU; device_sampler.h of others
  std::deque<Waiting> waiting_;
  std::vector<std::unique_ptr<Sequence>> slots_;  // null: free
  std::vector<std::unique_ptr<Sequence>> kept_;   // of free slots: the sequence that is over and still in it; or null
};

}  // namespace sluice
