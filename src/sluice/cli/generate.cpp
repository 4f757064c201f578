// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/generate.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

#include "sluice/cli/inputs.h"
#include "sluice/cli/model_loading.h"
#include "sluice/cli/processes.h"
#include "sluice/core/log.h"
#include "sluice/sample/engine.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

// Sequences that are sampled at once, at most: a GPU's step takes about as long for all of them as for one.
std::int64_t most_slots(at::Device device) { return device.is_cpu() ? 16 : 128; }

struct Prompt {
  Json given;  // a string, messages or ids
  std::vector<TokenId> tokens;
};

Json as_chat(const std::string& user) { return Json::array({{{"role", "user"}, {"content", user}}}); }

bool begins_with_system(const Json& messages) {
  if (messages.empty() || !messages[0].is_object()) return false;
  const auto role = value_or_null(messages[0], "role");
  return role == "system" || role == "developer";
}

class PromptReader {
 public:
  PromptReader(const GenerateOptions& options, std::int64_t vocab_size, InputEncoder& encoder)
      : options_(options), vocab_size_(vocab_size), encoder_(encoder) {}

  std::vector<Prompt> read_all() {
    std::vector<Prompt> prompts;
    for (const auto& text : options_.prompt) prompts.push_back(from_text(text, Json::object(), "--prompt"));
    if (options_.data) {
      read_records(*options_.data, [&](const Record& record) { prompts.push_back(from_record(record)); });
      if (prompts.empty()) fail_data("{}: no prompt in it", options_.data->string());
    }
    if (prompts.empty()) fail_usage("generate: nothing to continue; give --prompt TEXT or --data FILE");
    return prompts;
  }

 private:
  Prompt from_record(const Record& record) {
    const auto &json = record.json, messages = value_or_null(json, "messages"), prompt = value_or_null(json, "prompt"),
               tokens = value_or_null(json, "tokens");
    try {
      if (!messages.is_null()) return from_chat(messages, messages, json);
      if (prompt.is_array()) return from_chat(prompt, prompt, json);
      if (prompt.is_string()) return from_text(prompt.get<std::string>(), json, "prompt");
      if (!prompt.is_null()) fail_data("prompt must be a string or a list of messages, got {}", prompt.type_name());
      if (!tokens.is_null()) return checked({tokens, token_list(tokens, vocab_size_)}, "tokens");
      fail_data("a line needs prompt, messages or tokens");
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}: {}", record.place, error.what()));
    }
  }

  Prompt from_text(const std::string& text, const Json& record, const char* what) {
    if (options_.chat) return from_chat(text, as_chat(text), record);
    return checked({text, encoder_.text(text)}, what);
  }

  Prompt from_chat(const Json& given, Json messages, const Json& record) {
    if (options_.system && messages.is_array() && !begins_with_system(messages)) {
      messages.insert(messages.begin(), Json{{"role", "system"}, {"content", *options_.system}});
    }
    return checked({given, encoder_.conversation(messages, record, /*add_generation_prompt=*/true)}, "messages");
  }

  static Prompt checked(Prompt prompt, const char* what) {
    if (prompt.tokens.empty()) fail_data("{}: empty; an answer needs at least one token before it", what);
    return prompt;
  }

  const GenerateOptions& options_;
  std::int64_t vocab_size_;
  InputEncoder& encoder_;
};

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

void print_json(const Prompt& prompt, const Completion& completion) {
  fmt::print(R"({{"prompt": {}, "text": {}, "tokens": [{}], "logprobs": [{}], "finish_reason": "{}"}})"
             "\n",
             dump(prompt.given), dump(completion.text), fmt::join(completion.tokens, ", "),
             fmt::join(completion.model_logprobs, ", "),
             completion.finish_reason == FinishReason::kStop ? "stop" : "length");
}

void print_text(const Prompt& prompt, const Completion& completion) {
  fmt::print("> {}\n{}\n\n", prompt.given.is_string() ? prompt.given.get<std::string>() : dump(prompt.given),
             completion.text);
}

// Prints complete answers in the order of their prompts.
class OrderedOutput {
 public:
  OrderedOutput(const std::vector<Prompt>& prompts, bool json)
      : prompts_(prompts), json_(json), done_(prompts.size()) {}

  void finish(std::size_t index, const Completion& completion) {
    done_[index] = completion;
    for (; next_ < done_.size() && done_[next_]; ++next_) {
      (json_ ? print_json : print_text)(prompts_[next_], *done_[next_]);
      done_[next_].reset();
    }
    std::fflush(stdout);
  }

 private:
  const std::vector<Prompt>& prompts_;
  bool json_;
  std::vector<std::optional<Completion>> done_;
  std::size_t next_ = 0;
};

SamplingParameters sampling_of(const GenerateOptions& options, std::size_t index) {
  return {.temperature = options.temperature,
          .top_k = options.top_k,
          .top_p = options.top_p,
          .min_p = options.min_p,
          .repetition_penalty = options.repetition_penalty,
          .seed = static_cast<std::uint64_t>(options.seed),
          .sequence = index};
}

EngineSizes sizes_for(const std::vector<Prompt>& prompts, std::int64_t max_tokens, at::Device device) {
  std::size_t longest_prompt = 0;
  for (const auto& prompt : prompts) longest_prompt = std::max(longest_prompt, prompt.tokens.size());
  const auto longest = static_cast<std::int64_t>(longest_prompt);
  const auto slots = std::min(most_slots(device), static_cast<std::int64_t>(prompts.size()));
  const auto most = std::numeric_limits<std::int32_t>::max() / slots - longest;  // rows of a cache are int32
  if (max_tokens > most)
    fail_usage("--max_tokens: at most {} behind a prompt of {} tokens; got {}", most, longest, max_tokens);
  return {.slots = slots, .capacity = longest + max_tokens};
}

}  // namespace

ExitCode run_generate(const GenerateOptions& options, const Invocation& invocation) {
  only_one_process("generate");
  sampling_of(options, 0).check();
  InputEncoder encoder(options.model.path, options.chat_template, options.thinking);
  const auto prompts = PromptReader(options, vocab_size_of(options.model.path), encoder).read_all();
  if (invocation.dry_run) {
    fmt::print("prompts: {}; most tokens of one with its answer: {}\n", prompts.size(),
               sizes_for(prompts, options.max_tokens, at::kCPU).capacity);
    return ExitCode::kDone;
  }

  const auto loaded = load_model(options.model.path, options.device, options.dtype, {}, options.adapter);
  const auto sizes = sizes_for(prompts, options.max_tokens, loaded.device.device);
  const auto& tokenizer = encoder.tokenizer();
  Engine engine(*loaded.model.decoder, tokenizer, stop_ids(options.model.path, tokenizer), sizes);
  const bool streams = prompts.size() == 1 && !options.json;
  OrderedOutput output(prompts, options.json);
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    engine.submit({.prompt = prompts[i].tokens,
                   .max_tokens = options.max_tokens,
                   .sampling = sampling_of(options, i),
                   .stop = options.stop,
                   .on_text =
                       [streams](std::string_view piece) {
                         if (!streams) return;
                         fmt::print("{}", piece);
                         std::fflush(stdout);
                       },
                   .on_finish =
                       [&, i](const Completion& completion) {
                         tokens += static_cast<std::int64_t>(completion.tokens.size());
                         if (streams) fmt::print("\n");
                         else output.finish(i, completion);
                       }});
  }
  const auto start = std::chrono::steady_clock::now();
  engine.run();
  std::fflush(stdout);  // the answer comes before the log's line
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  log_info("{} tokens in {:.3f} s: {:.1f} tokens/s", tokens, elapsed.count(),
           static_cast<double>(tokens) / elapsed.count());
  return ExitCode::kDone;
}

}  // namespace sluice
