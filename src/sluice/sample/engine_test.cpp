// SPDX-License-Identifier: Apache-2.0
#include "sluice/sample/engine.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "sluice/core/error.h"
#include "sluice/data/utf8.h"
#include "sluice/models/testing.h"

namespace sluice {
namespace {

// One of them with random weights, spread so that logits differ clearly.
Model tiny_model(std::int64_t vocab_size = 1024, const std::string& preset = "qwen3_5-tiny") {
  auto config = tiny_configs().at(preset);
  config["initializer_range"] = 0.1;
  config["vocab_size"] = vocab_size;
  auto model = build_model(config, preset);
  initialize(model.parameters(), kFloat, 1);
  return model;
}

const Decoder& decoder() {
  static const auto model = tiny_model();
  return *model.decoder;
}

const Tokenizer& tokenizer() {
  static const auto loaded = Tokenizer::load(SLUICE_SOURCE_DIR "/examples/tiny/tokenizer");
  return loaded;
}

std::vector<TokenId> random_ids(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<TokenId> ids(count);
  for (auto& id : ids) id = static_cast<TokenId>(generator() % 1000);
  return ids;
}

Tensor to_tensor(const std::vector<TokenId>& ids) {
  return at::tensor(std::vector<std::int64_t>(ids.begin(), ids.end()), at::TensorOptions().dtype(kLong));
}

Tensor logits_of(const Tensor& hidden, const Decoder& model = decoder()) { return at::linear(hidden, model.head()); }

// The logits after the last token, from one forward pass over all.
Tensor full_logits(const std::vector<TokenId>& ids, const Decoder& model = decoder()) {
  const c10::InferenceMode inference;
  const auto hidden = model.forward(to_tensor(ids), make_pack({static_cast<std::int64_t>(ids.size())}));
  return logits_of(hidden, model)[-1];
}

// A sequence that goes through a slot in pieces.
struct Feed {
  std::vector<TokenId> ids;
  std::vector<std::int64_t> pieces;
  std::int64_t slot, fed = 0;
  std::size_t piece = 0;
  Tensor logits = {};  // after the newest token that was fed
};

// Feeds all of them, each step one piece of every sequence that has one left, in one pack.
void feed(std::vector<Feed>& feeds, DecoderState& state, const Decoder& model = decoder()) {
  const c10::InferenceMode inference;
  while (true) {
    std::vector<std::int64_t> lengths, past, slots;
    std::vector<TokenId> ids;
    std::vector<Feed*> taking_part;
    for (auto& f : feeds) {
      if (f.piece == f.pieces.size()) continue;
      const auto length = f.pieces[f.piece++];
      ids.insert(ids.end(), f.ids.begin() + f.fed, f.ids.begin() + f.fed + length);
      lengths.push_back(length);
      past.push_back(f.fed);
      slots.push_back(f.slot);
      f.fed += length;
      taking_part.push_back(&f);
    }
    if (taking_part.empty()) return;
    const auto logits = logits_of(model.forward(to_tensor(ids), make_pack(lengths, past, slots), &state), model);
    std::int64_t row = 0;
    for (std::size_t n = 0; n < taking_part.size(); ++n) {
      row += lengths[n];
      taking_part[n]->logits = logits[row - 1];
    }
  }
}

std::vector<std::int64_t> in_pieces_of(std::int64_t size, std::int64_t total) {
  std::vector<std::int64_t> pieces;
  for (std::int64_t done = 0; done < total; done += size) pieces.push_back(std::min(size, total - done));
  return pieces;
}

// Every way to cut T tokens into prefill and decoding steps.
std::vector<std::vector<std::int64_t>> cuts(std::int64_t tokens) {
  auto all_but_one = std::vector<std::int64_t>{tokens - 1, 1};
  if (tokens == 1) all_but_one = {1};
  return {{tokens}, all_but_one, in_pieces_of(1, tokens), in_pieces_of(64, tokens), in_pieces_of(7, tokens)};
}

const std::vector<std::int64_t> kLengths{1, 2, 3, 4, 5, 63, 64, 65, 66, 129};

// The chunked form and the token-by-token form of the recurrence add in different orders; float32 keeps about six
// digits through four layers, and the logits are below 100.
constexpr double kTolerance = 1e-4;

void expect_same_logits(const Tensor& got, const Tensor& wanted) {
  EXPECT_LT((got - wanted).abs().max().item<double>(), kTolerance);
}

TEST(CachedDecoding, EqualsTheFullForwardInEveryFamily) {
  for (const auto& [preset, config] : tiny_configs()) {
    const auto model = tiny_model(1024, preset);
    for (const auto length : kLengths) {
      const auto ids = random_ids(length, length);
      const auto wanted = full_logits(ids, *model.decoder);
      for (const auto& pieces : cuts(length)) {
        SCOPED_TRACE(fmt::format("{}: {} tokens, {} pieces, first {}", preset, length, pieces.size(), pieces[0]));
        auto state = model.decoder->new_state(1, 129);
        std::vector<Feed> feeds{{.ids = ids, .pieces = pieces, .slot = 0}};
        feed(feeds, state, *model.decoder);
        expect_same_logits(feeds[0].logits, wanted);
      }
    }
  }
}

TEST(CachedDecoding, SlotsDoNotSeeEachOther) {
  auto state = decoder().new_state(8, 129);
  std::vector<Feed> feeds;
  for (std::int64_t slot = 0; slot < 8; ++slot) {
    if (slot == 2 || slot == 5) continue;  // free slots between
    const auto length = kLengths[slot + 2];
    feeds.push_back({.ids = random_ids(length, 100 + slot), .pieces = cuts(length)[slot % 5], .slot = slot});
  }
  feed(feeds, state);
  for (const auto& f : feeds) expect_same_logits(f.logits, full_logits(f.ids));
}

TEST(CachedDecoding, AClearedSlotHoldsNothingOfTheLastSequence) {
  auto state = decoder().new_state(3, 129);
  for (std::uint64_t round = 0; round < 3; ++round) {
    std::vector<Feed> feeds;
    for (std::int64_t slot = 0; slot < 3; ++slot) {
      if (round > 0 && slot == 1) continue;  // goes on holding the first round's sequence
      const c10::InferenceMode inference;
      state.clear(int64s({slot}, at::kCPU));
      const auto ids = random_ids(70 - 20 * round + slot, 10 * round + slot);
      feeds.push_back({.ids = ids, .pieces = in_pieces_of(9, static_cast<std::int64_t>(ids.size())), .slot = slot});
    }
    feed(feeds, state);
    for (const auto& f : feeds) expect_same_logits(f.logits, full_logits(f.ids));
  }
}

GenerationRequest request(std::vector<TokenId> prompt, std::int64_t max_tokens, SamplingParameters sampling,
                          std::vector<std::string> stop = {}) {
  return {.prompt = std::move(prompt),
          .max_tokens = max_tokens,
          .sampling = sampling,
          .stop = std::move(stop),
          .on_text = {},
          .on_finish = {}};
}

std::vector<Completion> generate(std::vector<GenerationRequest> requests, const EngineSizes& sizes,
                                 const std::vector<TokenId>& stop_ids = {}, const Decoder& model = decoder()) {
  Engine engine(model, tokenizer(), stop_ids, sizes);
  std::vector<Completion> completions(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].on_finish = [&completions, i](const Completion& completion) { completions[i] = completion; };
    engine.submit(std::move(requests[i]));
  }
  engine.run();
  return completions;
}

constexpr SamplingParameters kGreedy{.temperature = 0};

// Greedy decoding by the full forward pass for every token.
std::vector<TokenId> greedy_by_hand(std::vector<TokenId> ids, std::int64_t count) {
  std::vector<TokenId> answer;
  for (std::int64_t i = 0; i < count; ++i) {
    answer.push_back(static_cast<TokenId>(full_logits(ids).argmax().item<std::int64_t>()));
    ids.push_back(answer.back());
  }
  return answer;
}

TEST(Engine, GreedyDecodingFollowsTheFullForward) {
  const auto prompt = random_ids(70, 1);
  const auto completion = generate({request(prompt, 12, kGreedy)}, {.slots = 1, .capacity = 100})[0];
  EXPECT_EQ(completion.tokens, greedy_by_hand(prompt, 12));
  EXPECT_EQ(completion.finish_reason, FinishReason::kLength);
  EXPECT_EQ(completion.text, tokenizer().decode(completion.tokens, true));
}

TEST(Engine, LogProbabilitiesAreThoseOfTheModel) {
  const auto prompt = random_ids(9, 2);
  const auto completion =
      generate({request(prompt, 20, {.temperature = 1.3, .top_k = 40})}, {.slots = 2, .capacity = 64})[0];
  auto ids = prompt;
  for (std::size_t i = 0; i < completion.tokens.size(); ++i) {
    const auto wanted = full_logits(ids).log_softmax(0)[completion.tokens[i]].item<double>();
    EXPECT_NEAR(completion.model_logprobs[i], wanted, kTolerance);
    ids.push_back(completion.tokens[i]);
  }
}

// Prompts of many lengths: what is drawn depends on prompt, seed and number of the sequence, not on company, slot, or
// on how prompts are cut into steps.
TEST(Engine, ASequenceDoesNotDependOnItsCompany) {
  std::vector<GenerationRequest> requests;
  for (std::uint64_t i = 0; i < 11; ++i) {
    const SamplingParameters sampling{
        .temperature = 0.9, .top_k = 50, .top_p = 0.95, .repetition_penalty = 1.1, .seed = 5, .sequence = i};
    requests.push_back(request(random_ids(1 + 13 * i, 50 + i), 6 + static_cast<std::int64_t>(i % 5) * 4, sampling));
  }
  const auto together = generate(requests, {.slots = 4, .capacity = 200, .tokens_per_step = 40});
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto alone = generate({requests[i]}, {.slots = 1, .capacity = 200})[0];
    EXPECT_EQ(alone.tokens, together[i].tokens) << "sequence " << i;
    EXPECT_EQ(alone.tokens.size(), static_cast<std::size_t>(requests[i].max_tokens));
  }
}

void expect_same_bits(const Completion& got, const Completion& wanted) {
  EXPECT_EQ(got.tokens, wanted.tokens);
  EXPECT_EQ(got.logprobs, wanted.logprobs);
  EXPECT_EQ(got.model_logprobs, wanted.model_logprobs);
  for (const auto kind : {&Completion::experts, &Completion::key_blocks}) {
    EXPECT_EQ((got.*kind).blocks, (wanted.*kind).blocks);
    EXPECT_EQ((got.*kind).chosen.defined(), (wanted.*kind).chosen.defined());
    EXPECT_TRUE(!(wanted.*kind).chosen.defined() || (got.*kind).chosen.equal((wanted.*kind).chosen));
  }
}

// Alone in an engine a request takes its prompt through the model itself. In one slot the passes have the same shapes
// then as those of a group, so that not even rounding differs; where more slots decode together, it may.
TEST(Engine, SamplesOfAGroupShareTheirPromptInEveryFamily) {
  for (const auto& [preset, config] : tiny_configs()) {
    const auto model = tiny_model(1024, preset);
    std::vector<GenerationRequest> requests;
    for (const std::size_t length : {1, 5, 64, 90}) {  // 90: past the sparse attention's budget
      for (std::uint64_t i = 0; i < 4; ++i) {
        requests.push_back(request(random_ids(length, length), 6 + static_cast<std::int64_t>(i),
                                   {.seed = 5, .sequence = requests.size()}));
        requests.back().keep_experts = requests.back().keep_key_blocks = true;
      }
    }
    std::vector<Completion> alone;
    for (const auto& one : requests) {
      alone.push_back(generate({one}, {.slots = 1, .capacity = 100, .tokens_per_step = 40}, {}, *model.decoder)[0]);
    }
    for (const std::int64_t slots : {1, 3, 16}) {
      const auto shared =
          generate(requests, {.slots = slots, .capacity = 100, .tokens_per_step = 40}, {}, *model.decoder);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        SCOPED_TRACE(fmt::format("{}: request {} in {} slots", preset, i, slots));
        if (slots == 1) {
          expect_same_bits(shared[i], alone[i]);
          continue;
        }
        ASSERT_EQ(shared[i].tokens, alone[i].tokens);
        for (std::size_t t = 0; t < alone[i].tokens.size(); ++t) {
          EXPECT_NEAR(shared[i].logprobs[t], alone[i].logprobs[t], kTolerance);
        }
      }
    }
  }
}

// Of one prompt of 60 tokens and 5 answers of 1 token: 60 tokens go through the model, in steps of 20, and the answers
// of the slots that are there come with the third.
TEST(Engine, AGroupCostsOnePrompt) {
  Engine engine(decoder(), tokenizer(), {}, {.slots = 3, .capacity = 61, .tokens_per_step = 20});
  std::int64_t finished = 0;
  for (std::uint64_t i = 0; i < 5; ++i) {
    auto one = request(random_ids(60, 1), 1, {.sequence = i});
    one.on_finish = [&](const Completion&) { ++finished; };
    engine.submit(std::move(one));
  }
  std::vector<std::int64_t> by_step;
  while (engine.step()) by_step.push_back(finished);
  EXPECT_EQ(by_step, (std::vector<std::int64_t>{0, 0, 3, 5}));
}

// What a sequence that is over left in its slot: the sequence that goes on behind it finds all but the new tokens
// there, and takes those alone through the model. Two go on at once, each from its own. Each history has more than the
// 20 tokens that go into a step; nine answered tokens need nine steps.
TEST(Engine, ASequenceGoesOnFromAKeptStateInEveryFamily) {
  for (const auto& [preset, config] : tiny_configs()) {
    const auto model = tiny_model(1024, preset);
    Engine engine(*model.decoder, tokenizer(), {}, {.slots = 4, .capacity = 140, .tokens_per_step = 20});
    std::vector<GenerationRequest> requests;
    std::vector<Completion> answers;
    std::vector histories{random_ids(30, 7), random_ids(50, 8)};
    for (std::uint64_t turn = 0; turn < 3; ++turn) {
      answers.resize(answers.size() + histories.size());
      for (std::uint64_t i = 0; i < histories.size(); ++i) {
        auto one = request(histories[i], 9, {.seed = 5, .sequence = i, .drawn = 9 * turn});
        one.keep_experts = one.keep_key_blocks = true;
        requests.push_back(one);
        one.keep_state = true;
        one.on_finish = [&answers, place = requests.size() - 1](const Completion& c) { answers[place] = c; };
        engine.submit(std::move(one));
      }
      std::int64_t steps = 0;
      while (engine.step()) ++steps;
      if (turn > 0) {
        EXPECT_EQ(steps, 9) << preset;
      }
      for (std::uint64_t i = 0; i < histories.size(); ++i) {
        for (const auto& more : {answers[histories.size() * turn + i].tokens, random_ids(6, 100 + turn)}) {
          histories[i].insert(histories[i].end(), more.begin(), more.end());
        }
      }
    }
    const auto afresh = generate(requests, {.slots = 6, .capacity = 140}, {}, *model.decoder);
    for (std::size_t i = 0; i < answers.size(); ++i) {
      SCOPED_TRACE(fmt::format("{}: request {}", preset, i));
      ASSERT_EQ(answers[i].tokens, afresh[i].tokens);
      for (std::size_t t = 0; t < answers[i].tokens.size(); ++t) {
        EXPECT_NEAR(answers[i].logprobs[t], afresh[i].logprobs[t], kTolerance);
      }
      for (const auto kind : {&Completion::experts, &Completion::key_blocks}) {
        const auto rows = [&](const Completion& c) {
          return (c.*kind).chosen.defined() ? (c.*kind).chosen.size(0) : 0;
        };
        EXPECT_EQ(rows(answers[i]), rows(afresh[i]));
      }
    }
  }
}

// Of two kept states that a prompt goes on behind, the one in the second slot holds more of it. The 56 tokens that the
// first lacks would be three steps of 20; the 7 that the second lacks are the first of five steps. The first one stays.
TEST(Engine, ASequenceGoesOnFromTheLongestKeptState) {
  Engine engine(decoder(), tokenizer(), {}, {.slots = 3, .capacity = 120, .tokens_per_step = 20});
  const auto after = [](const std::vector<TokenId>& before, std::size_t count, std::uint64_t seed) {
    auto all = before;
    for (const auto& more : {greedy_by_hand(before, 5), random_ids(count, seed)}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  };
  const auto steps_of = [&](const std::vector<std::vector<TokenId>>& prompts) {
    for (const auto& prompt : prompts) {
      auto one = request(prompt, 5, kGreedy);
      one.keep_state = true;
      one.on_finish = [prompt](const Completion& c) { EXPECT_EQ(c.tokens, greedy_by_hand(prompt, 5)); };
      engine.submit(std::move(one));
    }
    std::int64_t steps = 0;
    while (engine.step()) ++steps;
    return steps;
  };
  const auto first = random_ids(10, 1), second = after(first, 44, 2);
  steps_of({first, second});
  EXPECT_EQ(steps_of({after(second, 6, 3)}), 5);
  EXPECT_EQ(steps_of({after(first, 6, 4)}), 5);
}

// A kept state gives way: to a sequence that finds no other slot free, and with sleep(). What goes on behind it begins
// anew then, which takes another step, as 20 tokens of a prompt go into one.
TEST(Engine, AKeptStateGivesWayToWhatRuns) {
  Engine engine(decoder(), tokenizer(), {}, {.slots = 2, .capacity = 100, .tokens_per_step = 20});
  auto history = random_ids(20, 1);
  const auto go_on = [&] {  // five tokens more; the number of steps
    auto one = request(history, 5, kGreedy);
    one.keep_state = true;
    std::vector<TokenId> answer;
    one.on_finish = [&](const Completion& c) { answer = c.tokens; };
    engine.submit(std::move(one));
    std::int64_t steps = 0;
    while (engine.step()) ++steps;
    EXPECT_EQ(answer, greedy_by_hand(history, 5));
    history.insert(history.end(), answer.begin(), answer.end());
    return steps;
  };
  const auto run_others = [&](std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) engine.submit(request(random_ids(20, 2 + i), 5, kGreedy));
    engine.run();
  };
  EXPECT_EQ(go_on(), 5);
  run_others(1);  // in the other slot
  EXPECT_EQ(go_on(), 5);
  run_others(2);
  EXPECT_EQ(go_on(), 6);
  EXPECT_EQ(go_on(), 5);
  engine.sleep();
  EXPECT_EQ(go_on(), 6);
}

TEST(Engine, ASeedRepeatsAndAnotherDiffers) {
  const auto run = [](std::uint64_t seed, std::uint64_t sequence) {
    return generate({request(random_ids(5, 3), 30, {.seed = seed, .sequence = sequence})},
                    {.slots = 1, .capacity = 64})[0]
        .tokens;
  };
  EXPECT_EQ(run(1, 0), run(1, 0));
  EXPECT_NE(run(1, 0), run(2, 0));
  EXPECT_NE(run(1, 0), run(1, 1));
}

TEST(Engine, AStopIdEndsTheAnswerAndBelongsToIt) {
  const auto prompt = random_ids(12, 4);
  const auto free = generate({request(prompt, 20, kGreedy)}, {.slots = 1, .capacity = 64})[0];
  const auto stop_id = free.tokens[7];
  const auto first = std::ranges::find(free.tokens, stop_id) - free.tokens.begin();
  const auto stopped = generate({request(prompt, 20, kGreedy)}, {.slots = 1, .capacity = 64}, {900, stop_id, 3})[0];
  EXPECT_EQ(stopped.finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped.tokens, std::vector(free.tokens.begin(), free.tokens.begin() + first + 1));
  EXPECT_EQ(stopped.logprobs.size(), stopped.tokens.size());
  EXPECT_EQ(stopped.text, tokenizer().decode(std::span(free.tokens).first(first), true));
}

TEST(Engine, AStopStringCutsTheTextAndKeepsTheTokens) {
  const auto prompt = random_ids(12, 5);
  const auto free = generate({request(prompt, 40, kGreedy)}, {.slots = 1, .capacity = 64})[0];
  ASSERT_GT(free.text.size(), 20);
  // Some bytes of the middle of the text, which no token need begin with.
  std::size_t begin = free.text.size() / 2, length = 5;
  while ((free.text[begin] & 0xC0) == 0x80) ++begin;
  while ((free.text[begin + length] & 0xC0) == 0x80) ++length;
  const auto stop = free.text.substr(begin, length);
  auto stopping = request(prompt, 40, kGreedy, {"never in it", stop});
  std::string streamed;
  stopping.on_text = [&](std::string_view piece) { streamed += piece; };
  const auto stopped = generate({stopping}, {.slots = 1, .capacity = 64})[0];
  EXPECT_EQ(stopped.finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped.text, free.text.substr(0, free.text.find(stop)));
  EXPECT_EQ(streamed, stopped.text);
  EXPECT_LT(stopped.tokens.size(), free.tokens.size());
  EXPECT_TRUE(std::ranges::equal(stopped.tokens, std::span(free.tokens).first(stopped.tokens.size())));
}

TEST(Engine, StreamsTheTextInWholeCharacters) {
  auto streaming = request(random_ids(6, 6), 60, {.temperature = 1.5});
  std::string text;
  streaming.on_text = [&](std::string_view piece) {
    EXPECT_FALSE(find_broken_utf8(piece));
    text += piece;
  };
  const auto completion = generate({streaming}, {.slots = 1, .capacity = 100})[0];
  EXPECT_EQ(text, completion.text);
  EXPECT_EQ(text, tokenizer().decode(completion.tokens, true));
}

TEST(Engine, NeverDrawsAnIdThatTheTokenizerLacks) {
  const auto padded = tiny_model(2 * tokenizer().vocab_size());
  Engine engine(*padded.decoder, tokenizer(), {}, {.slots = 1, .capacity = 301});
  auto flat = request({1}, 300, {.temperature = 100});
  std::int64_t drawn = 0;
  flat.on_finish = [&](const Completion& completion) {
    for (const auto id : completion.tokens) EXPECT_LT(id, tokenizer().vocab_size());
    drawn = static_cast<std::int64_t>(completion.tokens.size());
  };
  engine.submit(flat);
  engine.run();
  EXPECT_EQ(drawn, 300);
}

TEST(Engine, RefusesWhatItCannotServe) {
  Engine engine(decoder(), tokenizer(), {}, {.slots = 1, .capacity = 16});
  const std::vector<std::pair<GenerationRequest, ExitCode>> bad{
      {request({}, 4, {}), ExitCode::kData},     {request({-1}, 4, {}), ExitCode::kData},
      {request({1024}, 4, {}), ExitCode::kData}, {request(random_ids(14, 1), 3, {}), ExitCode::kData},
      {request({1}, 0, {}), ExitCode::kUsage},   {request({1}, 4, {.top_p = 2}), ExitCode::kUsage}};
  for (const auto& [refused, code] : bad) {
    try {
      engine.submit(refused);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
    }
  }
  EXPECT_FALSE(engine.step());
}

}  // namespace
}  // namespace sluice
