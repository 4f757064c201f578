// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/rewards.h"

#include <pcre2.h>

#include <algorithm>

#include "sluice/core/error.h"
#include "sluice/rl/answers.h"

namespace sluice {
namespace {

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r\n"), end = text.find_last_not_of(" \t\r\n");
  return begin == std::string::npos ? std::string() : text.substr(begin, end - begin + 1);
}

// Matches a whole text. A match that needs too much time or memory is none.
class WholeMatch {
 public:
  explicit WholeMatch(const std::string& pattern) {
    int error = 0;
    PCRE2_SIZE place = 0;
    code_ = {pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                           PCRE2_UTF | PCRE2_DOTALL | PCRE2_ANCHORED | PCRE2_ENDANCHORED, &error, &place, nullptr),
             pcre2_code_free};
    if (!code_) {
      PCRE2_UCHAR text[256];
      pcre2_get_error_message(error, text, sizeof text);
      fail_usage("reward.pattern: {} at character {} of {}", reinterpret_cast<const char*>(text), place, pattern);
    }
  }

  bool matches(const std::string& text) const {
    const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(pcre2_match_data_create(1, nullptr),
                                                                                   pcre2_match_data_free);
    return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0, 0, data.get(),
                       nullptr) >= 0;
  }

 private:
  std::shared_ptr<pcre2_code> code_;
};

bool needs_answer(RewardKind kind) {
  return kind == RewardKind::kExactMatch || kind == RewardKind::kGsm8k || kind == RewardKind::kGsm8kFlexible ||
         kind == RewardKind::kMath;
}

bool gsm8k(const AnsweredPrompt& a, const std::function<std::optional<std::string>(std::string_view)>& find) {
  const auto found = find(a.completion), gold = gsm8k_gold(a.prompt->answer);
  return found && gold && equal_decimals(*found, *gold);
}

bool math(const AnsweredPrompt& a) {
  const auto found = boxed_answer(a.completion);
  return found && equal_math(*found, boxed_answer(a.prompt->answer).value_or(a.prompt->answer));
}

void check_gym_record(const Prompt& prompt) {
  const auto entry = prompt.record.find("reasoning_gym");
  if (entry != prompt.record.end() && entry->is_object()) return;
  fail_data(
      "{}: no object under reasoning_gym, which kind = reasoning_gym judges by; python -m sluice.reasoning_gym "
      "writes such records",
      prompt.place);
}

void check_options(const RewardOptions& o) {
  const auto only = [&](bool given, const char* name, RewardKind kind, const char* kind_name) {
    if (given && o.kind != kind) fail_usage("reward.{} belongs to kind = {}", name, kind_name);
    if (!given && o.kind == kind) fail_usage("reward: kind = {} needs {}", kind_name, name);
  };
  only(o.pattern.has_value(), "pattern", RewardKind::kFormat, "format");
  only(o.buffer > 0, "buffer", RewardKind::kLength, "length");
  only(o.python.has_value(), "python", RewardKind::kPython, "python");
  only(!o.command.empty(), "command", RewardKind::kCommand, "command");
}

// Of the process that judges; empty: none does.
std::vector<std::string> command_of(const RewardOptions& o) {
  if (o.kind == RewardKind::kPython) return python_judge(*o.python);
  if (o.kind == RewardKind::kReasoningGym) return reasoning_gym_judge();
  return o.command;
}

std::function<std::optional<double>(const AnsweredPrompt&)> rule_of(const RewardOptions& o, std::int64_t max_tokens) {
  switch (o.kind) {
    case RewardKind::kGsm8k:
      return [](const AnsweredPrompt& a) { return gsm8k(a, gsm8k_strict) ? 1.0 : 0.0; };
    case RewardKind::kGsm8kFlexible:
      return [](const AnsweredPrompt& a) { return gsm8k(a, gsm8k_flexible) ? 1.0 : 0.0; };
    case RewardKind::kMath:
      return [](const AnsweredPrompt& a) { return math(a) ? 1.0 : 0.0; };
    case RewardKind::kFormat:
      return
          [match = WholeMatch(*o.pattern)](const AnsweredPrompt& a) { return match.matches(a.completion) ? 1.0 : 0.0; };
    case RewardKind::kEnvironment:
      return [](const AnsweredPrompt& a) { return a.episode_reward; };
    case RewardKind::kLength:
      return [buffer = o.buffer, max_tokens](const AnsweredPrompt& a) {
        return overlong_penalty(a.tokens, max_tokens, buffer);
      };
    default:
      return [](const AnsweredPrompt& a) { return trimmed(a.completion) == trimmed(a.prompt->answer) ? 1.0 : 0.0; };
  }
}

}  // namespace

Rewards::Rewards(const std::vector<RewardOptions>& options, std::int64_t max_tokens) {
  if (options.empty()) fail_usage("no [[reward]] is given: an answer would be worth nothing");
  for (const auto& o : options) {
    check_options(o);
    Part part{.kind = o.kind, .weight = o.weight, .rule = {}, .judge = {}};
    if (auto command = command_of(o); !command.empty()) {
      part.judge = std::make_unique<Judge>(
          std::move(command),
          JudgeLimits{
              .workers = o.workers,
              .worker = {.load_timeout_s = o.load_timeout_s, .timeout_s = o.timeout_s, .memory_gib = o.memory_gib},
              .retries = o.retries});
    } else {
      part.rule = rule_of(o, max_tokens);
    }
    parts_.push_back(std::move(part));
  }
}

void Rewards::check(const std::vector<Prompt>& prompts) const {
  for (const auto& part : parts_) {
    if (part.kind == RewardKind::kReasoningGym) {
      for (const auto& prompt : prompts) check_gym_record(prompt);
    }
    if (!needs_answer(part.kind)) continue;
    const bool number = part.kind == RewardKind::kGsm8k || part.kind == RewardKind::kGsm8kFlexible;
    for (const auto& prompt : prompts) {
      if (prompt.answer.empty()) {
        fail_data("{}: no answer to compare with, under answer, label or ground_truth; data.answer_key names another",
                  prompt.place);
      }
      if (number && !gsm8k_gold(prompt.answer)) {
        fail_data("{}: the answer gives no number, which GSM8K's rule compares: {}", prompt.place, prompt.answer);
      }
    }
  }
}

std::vector<std::optional<Verdict>> Rewards::judge(std::span<const AnsweredPrompt> answers) {
  std::vector<std::optional<Verdict>> verdicts(answers.size(), Verdict{.parts = {}, .reward = 0});
  for (auto& part : parts_) {
    std::vector<std::optional<double>> found;
    if (part.judge) {
      std::vector<nlohmann::ordered_json> requests;
      for (const auto& a : answers) {
        requests.push_back({{"prompt", a.prompt->text},
                            {"completion", a.completion},
                            {"answer", a.prompt->answer},
                            {"record", a.prompt->record}});
      }
      found = part.judge->judge(requests);
    } else {
      for (const auto& a : answers) found.push_back(part.rule(a));
    }
    for (std::size_t i = 0; i < answers.size(); ++i) {
      if (!verdicts[i]) continue;
      if (!found[i]) {
        verdicts[i].reset();
        continue;
      }
      verdicts[i]->parts.push_back(*found[i]);
      verdicts[i]->reward += part.weight * *found[i];
    }
  }
  return verdicts;
}

std::int64_t Rewards::failures() const {
  std::int64_t sum = 0;
  for (const auto& part : parts_) sum += part.judge ? part.judge->failures() : 0;
  return sum;
}

std::string Rewards::last_failure() const {
  std::string last;
  for (const auto& part : parts_) {
    if (part.judge && !part.judge->last_failure().empty()) last = part.judge->last_failure();
  }
  return last;
}

}  // namespace sluice
