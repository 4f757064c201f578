// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/engine.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "sluice/core/error.h"
#include "sluice/sample/device_sampler.h"
#include "sluice/sample/random.h"

namespace sluice {

// Choices for the tokens of a sequence, as they come in.
struct Engine::KeptChoices {
  std::vector<std::int64_t> blocks;
  std::vector<Tensor> pieces;

  void add(const Choices& choices, std::int64_t first, std::int64_t count) {
    if (!choices.chosen.defined()) return;
    blocks = choices.blocks;
    pieces.push_back(choices.chosen.narrow(0, first, count).clone());
  }
  Choices all() const { return {.blocks = blocks, .chosen = pieces.empty() ? Tensor() : at::cat(pieces)}; }
};

// A prompt after its way through the model, for the sequences that begin with it.
struct Engine::SharedPrompt {
  bool taken = false;     // a sequence is on the way or has been
  Tensor logits;          // [1, V], after its last token; undefined: it has not been through the model yet
  std::int64_t slot = 0;  // that it went through
  DecoderState state;     // what that held then; without blocks: all that follow are there to copy it from the slot
  KeptChoices experts, key_blocks;
};

struct Engine::Sequence {
  GenerationRequest request;
  std::shared_ptr<SharedPrompt> shared;  // until its prompt is in the slot
  bool follows;                          // the prompt comes from another sequence
  std::vector<TokenId> tokens;           // prompt and answer
  std::int64_t cached = 0;               // tokens that the slot holds
  std::vector<TokenId> distinct;         // ids in `tokens`, kept with a repetition penalty alone
  std::vector<bool> is_in_distinct;
  Tokenizer::Stream stream;
  StopStrings stops;
  Completion completion;
  KeptChoices experts, key_blocks;

  Sequence(Waiting from, const Tokenizer& tokenizer)
      : request(std::move(from.request)),
        shared(std::move(from.shared)),
        follows(shared && std::exchange(shared->taken, true)),
        stream(tokenizer, /*skip_special=*/true),
        stops(request.stop) {
    for (const auto id : request.prompt) append(id);
  }

  void append(TokenId id) {
    tokens.push_back(id);
    if (request.sampling.repetition_penalty == 1) return;
    const auto place = static_cast<std::size_t>(id);
    if (is_in_distinct.size() <= place) is_in_distinct.resize(place + 1);
    if (!is_in_distinct[place]) distinct.push_back(id);
    is_in_distinct[place] = true;
  }

  void release(const std::string& text) {
    if (text.empty()) return;
    completion.text += text;
    if (request.on_text) request.on_text(text);
  }

  // That have to go through the model.
  std::int64_t waiting_tokens() const { return follows ? 0 : std::ssize(tokens) - cached; }
  std::uint64_t sampled() const { return completion.tokens.size(); }
};

struct Engine::StepPlan {
  std::vector<std::int64_t> slots, past, lengths;
  std::vector<std::size_t> sampling;    // slots whose last known token is in the pack
  std::vector<std::int64_t> last_rows;  // where, for each of `sampling`
  std::vector<std::int64_t> tokens;
  bool is_decoding() const { return tokens.size() == sampling.size(); }  // one token of each sequence
};

Engine::Engine(const Decoder& decoder, Tokenizer tokenizer, std::vector<TokenId> stop_ids, const EngineSizes& sizes)
    : decoder_(decoder),
      tokenizer_(std::move(tokenizer)),
      stop_ids_(std::move(stop_ids)),
      sizes_(sizes),
      sampler_(drawable()),
      slots_(static_cast<std::size_t>(sizes.slots)),
      kept_(slots_.size()) {
  SLUICE_CHECK(sizes.slots >= 1 && sizes.capacity >= 2 && sizes.tokens_per_step >= sizes.slots,
               "engine: {} slots of {} tokens and {} tokens a step; a slot needs 2 tokens, a step one for each slot",
               sizes.slots, sizes.capacity, sizes.tokens_per_step);
  SLUICE_CHECK(sizes.capacity <= std::numeric_limits<std::int32_t>::max() / sizes.slots,
               "engine: {} slots of {} tokens; together at most 2^31 - 1", sizes.slots, sizes.capacity);
  std::ranges::sort(stop_ids_);
}

Engine::~Engine() = default;

void Engine::submit(GenerationRequest request) {
  request.sampling.check();
  const auto length = static_cast<std::int64_t>(request.prompt.size());
  if (request.max_tokens < 1) fail_usage("generate: max_tokens must be at least 1; got {}", request.max_tokens);
  if (length == 0) fail_data("generate: the prompt holds no token; an answer needs at least one before it");
  if (length > sizes_.capacity || request.max_tokens > sizes_.capacity - length) {
    fail_data("generate: a prompt of {} tokens and {} new ones do not fit into {}", length, request.max_tokens,
              sizes_.capacity);
  }
  for (const auto id : request.prompt) {
    if (id < 0 || id >= decoder_.vocab_size()) {
      fail_data("generate: the prompt holds the id {}; the model's vocabulary ends at {}", id,
                decoder_.vocab_size() - 1);
    }
  }
  if (const auto slot = longest_kept(request)) return continue_kept(*slot, std::move(request));
  std::shared_ptr<SharedPrompt> shared;
  if (!waiting_.empty()) {
    auto& last = waiting_.back();
    if (last.request.prompt == request.prompt && last.request.keep_experts == request.keep_experts &&
        last.request.keep_key_blocks == request.keep_key_blocks) {
      if (!last.shared) last.shared = std::make_shared<SharedPrompt>();
      shared = last.shared;
    }
  }
  waiting_.push_back({std::move(request), std::move(shared)});
}

// The slot of the longest kept sequence that a request's prompt goes on behind; none: there is none.
std::optional<std::size_t> Engine::longest_kept(const GenerationRequest& request) const {
  std::optional<std::size_t> longest;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!kept_[slot] || (longest && kept_[slot]->cached <= kept_[*longest]->cached)) continue;
    const auto known = std::span(kept_[slot]->tokens).first(static_cast<std::size_t>(kept_[slot]->cached));
    const auto& before = kept_[slot]->request;
    if (request.prompt.size() > known.size() &&
        std::ranges::equal(known, std::span(request.prompt).first(known.size())) &&
        before.keep_experts == request.keep_experts && before.keep_key_blocks == request.keep_key_blocks) {
      longest = slot;
    }
  }
  return longest;
}

void Engine::continue_kept(std::size_t slot, GenerationRequest request) {
  const auto before = std::move(kept_[slot]);
  auto sequence = std::make_unique<Sequence>(Waiting{.request = std::move(request), .shared = nullptr}, tokenizer_);
  sequence->cached = before->cached;
  sequence->experts = std::move(before->experts);
  sequence->key_blocks = std::move(before->key_blocks);
  slots_[slot] = std::move(sequence);
}

// Gives free slots to waiting requests, those that keep a state last.
void Engine::admit() {
  std::vector<std::int64_t> to_clear;
  for (const bool give_kept : {false, true}) {
    for (std::size_t slot = 0; slot < slots_.size() && !waiting_.empty(); ++slot) {
      if (slots_[slot] || (kept_[slot] && !give_kept)) continue;
      kept_[slot].reset();
      slots_[slot] = std::make_unique<Sequence>(std::move(waiting_.front()), tokenizer_);
      waiting_.pop_front();
      if (!slots_[slot]->follows) to_clear.push_back(static_cast<std::int64_t>(slot));
    }
  }
  if (!to_clear.empty()) state_.clear(int64s(to_clear, decoder_.device()));
}

Engine::StepPlan Engine::plan() const {
  const auto decoding = std::ranges::count_if(slots_, [](const auto& s) { return s && s->waiting_tokens() == 1; });
  auto prompt_budget = sizes_.tokens_per_step - decoding;
  StepPlan plan;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_[slot]) continue;
    const auto& sequence = *slots_[slot];
    const auto waiting = sequence.waiting_tokens();
    const auto length = waiting == 1 ? 1 : std::min(waiting, prompt_budget);
    if (length == 0) continue;
    if (waiting > 1) prompt_budget -= length;
    plan.slots.push_back(static_cast<std::int64_t>(slot));
    plan.past.push_back(sequence.cached);
    plan.lengths.push_back(length);
    const auto first = sequence.tokens.begin() + sequence.cached;
    plan.tokens.insert(plan.tokens.end(), first, first + length);
    if (length == waiting) {
      plan.sampling.push_back(slot);
      plan.last_rows.push_back(static_cast<std::int64_t>(plan.tokens.size()) - 1);
    }
  }
  return plan;
}

bool Engine::asked_for(bool GenerationRequest::*kind, const StepPlan& plan) const {
  return std::ranges::any_of(plan.slots,
                             [&](std::int64_t slot) { return slots_[static_cast<std::size_t>(slot)]->request.*kind; });
}

void Engine::sleep() {
  SLUICE_CHECK(waiting_.empty() && is_idle(), "engine: sequences are running; it can sleep between them alone");
  graphs_.reset();
  state_ = {};
  for (auto& sequence : kept_) sequence.reset();
}

// Takes the plan's tokens through the model: the logits after the last ones of `sampling`, [n, V] float32; undefined
// where there are none.
Tensor Engine::forward(const StepPlan& plan, const Replay& replay) {
  const auto device = decoder_.device();
  if (records_steps() && plan.is_decoding()) {
    if (graphs_ == nullptr) graphs_ = std::make_unique<DecodeGraphs>(decoder_, sizes_.capacity);
    std::vector<DecodeRow> rows;
    for (std::size_t n = 0; n < plan.slots.size(); ++n) rows.push_back({plan.tokens[n], plan.slots[n], plan.past[n]});
    auto output = graphs_->step(rows, /*spare_slot=*/sizes_.slots, state_, replay.experts != nullptr);
    if (replay.experts != nullptr) *replay.experts = std::move(output.experts);
    return output.logits;
  }
  const auto hidden =
      decoder_.forward(int64s(plan.tokens, device), make_pack(plan.lengths, plan.past, plan.slots, device), &state_,
                       /*router_load=*/nullptr, /*residual=*/nullptr, replay);
  if (plan.sampling.empty()) return {};
  const auto last = plan.is_decoding() ? hidden : hidden.index_select(0, int64s(plan.last_rows, device));
  return logits_of(last, decoder_.head());
}

std::vector<SampledToken> Engine::draw(const Tensor& logits, std::span<const std::size_t> slots) {
  std::vector<RowToSample> rows;
  for (const auto slot : slots) {
    const auto& sequence = *slots_[slot];
    const auto& sampling = sequence.request.sampling;
    rows.push_back(
        {sampling, sequence.distinct, uniform(sampling.seed, sampling.sequence, sampling.drawn + sequence.sampled())});
  }
  if (!logits.is_cpu()) return draw_rows(logits, drawable(), rows);
  const auto vocab = static_cast<std::size_t>(logits.size(1));
  std::vector<SampledToken> drawn;
  for (const auto& row : rows) {
    const std::span scores(logits.const_data_ptr<float>() + drawn.size() * vocab, vocab);
    drawn.push_back(sampler_.draw(scores, row.parameters, row.seen, row.random));
  }
  return drawn;
}

// Takes the plan's tokens through the model, and what it chose to their sequences.
Tensor Engine::run_model(const StepPlan& plan) {
  ChoiceRecord experts, key_blocks;
  const auto logits =
      forward(plan, {.experts = asked_for(&GenerationRequest::keep_experts, plan) ? &experts : nullptr,
                     .key_blocks = asked_for(&GenerationRequest::keep_key_blocks, plan) ? &key_blocks : nullptr});
  const auto chosen_experts = experts.kept(), chosen_blocks = key_blocks.kept();
  std::int64_t first_row = 0;
  for (std::size_t n = 0; n < plan.slots.size(); ++n) {
    auto& sequence = *slots_[static_cast<std::size_t>(plan.slots[n])];
    const auto length = plan.lengths[n];
    sequence.cached += length;
    if (sequence.request.keep_experts) sequence.experts.add(chosen_experts, first_row, length);
    if (sequence.request.keep_key_blocks) sequence.key_blocks.add(chosen_blocks, first_row, length);
    first_row += length;
  }
  return logits;
}

// Makes what the slot holds, which is the prompt, and the logits after it known to those that follow.
void Engine::share(const std::shared_ptr<SharedPrompt>& prompt, std::size_t slot, const Tensor& logits) const {
  const auto& sequence = *slots_[slot];
  prompt->logits = logits.clone();
  prompt->slot = static_cast<std::int64_t>(slot);
  prompt->experts = sequence.experts;
  prompt->key_blocks = sequence.key_blocks;
  const auto here = std::ranges::count_if(slots_, [&](const auto& s) { return s && s->shared == prompt; });
  if (prompt.use_count() == here + 1) return;  // nobody waits for a slot yet
  const auto device = decoder_.device();
  prompt->state = decoder_.new_state(/*slots=*/1, sequence.cached);
  prompt->state.copy(int64s({0}, device), state_, int64s({prompt->slot}, device), sequence.cached);
}

// Puts prompts that are known into the slots of the sequences that follow; those slots.
std::vector<std::size_t> Engine::follow() {
  const auto device = decoder_.device();
  std::vector<std::size_t> followers;
  std::vector<std::int64_t> to, from;  // slots
  std::int64_t longest = 0;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_[slot] || !slots_[slot]->follows || !slots_[slot]->shared->logits.defined()) continue;
    auto& sequence = *slots_[slot];
    const auto& prompt = *sequence.shared;
    const auto place = static_cast<std::int64_t>(slot);
    sequence.cached = std::ssize(sequence.tokens);
    if (prompt.state.blocks.empty()) {
      to.push_back(place);
      from.push_back(prompt.slot);
      longest = std::max(longest, sequence.cached);
    } else {
      state_.copy(int64s({place}, device), prompt.state, int64s({0}, device), sequence.cached);
    }
    sequence.experts = prompt.experts;
    sequence.key_blocks = prompt.key_blocks;
    sequence.follows = false;
    followers.push_back(slot);
  }
  if (!to.empty()) state_.copy(int64s(to, device), state_, int64s(from, device), longest);
  return followers;
}

bool Engine::step() {
  const c10::InferenceMode inference;
  // Where steps are recorded one slot more, for rows that such a step has too many.
  if (state_.blocks.empty()) state_ = decoder_.new_state(sizes_.slots + (records_steps() ? 1 : 0), sizes_.capacity);
  if (is_idle() && graphs_ != nullptr && graphs_->are_stale()) graphs_.reset();
  admit();
  if (is_idle()) return false;

  const auto plan = this->plan();  // without tokens where every sequence follows a prompt that is known
  auto sampling = plan.sampling;   // slots of the sequences whose next token is drawn
  std::vector<Tensor> logits;      // of each, in one or more rows
  if (!plan.tokens.empty()) {
    const auto found = run_model(plan);
    if (found.defined()) logits.push_back(found);
  }
  for (std::size_t row = 0; row < plan.sampling.size(); ++row) {
    const auto slot = plan.sampling[row];
    const auto shared = std::move(slots_[slot]->shared);
    if (shared.use_count() > 1) share(shared, slot, logits[0].narrow(0, static_cast<std::int64_t>(row), 1));
  }
  for (const auto slot : follow()) {
    const auto prompt = std::move(slots_[slot]->shared);
    logits.push_back(prompt->logits);
    sampling.push_back(slot);
  }
  if (sampling.empty()) return true;

  const auto drawn = draw(logits.size() == 1 ? logits[0] : at::cat(logits), sampling);
  for (std::size_t row = 0; row < drawn.size(); ++row) accept(sampling[row], drawn[row]);
  return true;
}

void Engine::accept(std::size_t slot, const SampledToken& token) {
  auto& sequence = *slots_[slot];
  auto& completion = sequence.completion;
  sequence.append(token.id);
  completion.tokens.push_back(token.id);
  completion.logprobs.push_back(token.logprob);
  completion.model_logprobs.push_back(token.model_logprob);
  if (std::ranges::binary_search(stop_ids_, token.id)) return finish(slot, FinishReason::kStop);
  sequence.release(sequence.stops.push(sequence.stream.push(token.id)));
  if (sequence.stops.found()) return finish(slot, FinishReason::kStop);
  if (static_cast<std::int64_t>(sequence.sampled()) == sequence.request.max_tokens) finish(slot, FinishReason::kLength);
}

void Engine::finish(std::size_t slot, FinishReason reason) {
  auto sequence = std::move(slots_[slot]);
  if (!sequence->stops.found()) {
    sequence->release(sequence->stops.push(sequence->stream.finish()));
    sequence->release(sequence->stops.finish());
  }
  sequence->completion.finish_reason = reason;
  sequence->completion.experts = sequence->experts.all();
  sequence->completion.key_blocks = sequence->key_blocks.all();
  if (sequence->request.on_finish) sequence->request.on_finish(sequence->completion);
  if (sequence->request.keep_state) kept_[slot] = std::move(sequence);
}

}  // namespace sluice
