// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/score.h"

#include <c10/core/InferenceMode.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cmath>

#include "sluice/cli/inputs.h"
#include "sluice/cli/model_loading.h"
#include "sluice/cli/processes.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/core/progress.h"
#include "sluice/data/packing.h"
#include "sluice/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace sluice {
namespace {

constexpr std::int64_t kTokensPerPack = 4096;  // of one forward pass: enough to fill matrix products, little in memory

struct Sequence {
  std::vector<TokenId> tokens;
  std::string place;  // of its record
};

Sequence read_sequence(const Record& record, std::int64_t vocab_size, InputEncoder& encoder) {
  const auto& json = record.json;
  try {
    if (const auto messages = value_or_null(json, "messages"); !messages.is_null()) {
      return {encoder.conversation(messages, json, /*add_generation_prompt=*/false), record.place};
    }
    if (const auto text = value_or_null(json, "text"); !text.is_null()) {
      if (!text.is_string()) fail_data("text must be a string, got {}", text.type_name());
      return {encoder.text(text.get<std::string>()), record.place};
    }
    if (const auto tokens = value_or_null(json, "tokens"); !tokens.is_null()) {
      return {token_list(tokens, vocab_size), record.place};
    }
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", record.place, error.what()));
  }
  fail_data("{}: a line to score needs messages, text or tokens", record.place);
}

// The log-probability of every token but the first of each sequence, one behind the other.
std::vector<float> logprobs_of(const Decoder& decoder, const std::vector<Sequence>& sequences) {
  const c10::InferenceMode inference;
  std::vector<std::int64_t> tokens, targets, lengths;
  for (const auto& sequence : sequences) {
    if (sequence.tokens.empty()) continue;
    tokens.insert(tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
    targets.insert(targets.end(), sequence.tokens.begin() + 1, sequence.tokens.end());
    targets.push_back(kIgnoredTarget);
    lengths.push_back(static_cast<std::int64_t>(sequence.tokens.size()));
  }
  std::vector<float> logprobs;
  if (tokens.empty()) return logprobs;
  const auto device = decoder.device();
  const auto there = [&](const std::vector<std::int64_t>& ids) {
    return at::tensor(ids, at::TensorOptions().dtype(kLong)).to(device, /*non_blocking=*/true);
  };
  const auto hidden = decoder.forward(there(tokens), make_pack(lengths, {}, {}, device));
  const auto nll = linear_cross_entropy(hidden, decoder.head(), there(targets)).nll.cpu().contiguous();
  const auto* values = nll.const_data_ptr<float>();
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] != kIgnoredTarget) logprobs.push_back(0 - values[i]);  // 0 - 0 has no sign
  }
  return logprobs;
}

struct Totals {
  std::int64_t sequences = 0, tokens = 0, scored = 0;
  double logprob = 0;
};

void write_scores(const std::vector<Sequence>& sequences, const std::vector<float>& logprobs, AtomicFile& out,
                  Totals& totals) {
  auto next = logprobs.begin();
  for (const auto& [tokens, place] : sequences) {
    std::string line = fmt::format(R"({{"tokens": [{}], "logprobs": [)", fmt::join(tokens, ", "));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (i == 0) {
        line += "null";
        continue;
      }
      if (!std::isfinite(*next)) {
        fail(ExitCode::kNan, "{}: the log-probability of token {} is {}; the model's weights are damaged", place, i,
             *next);
      }
      totals.logprob += *next;
      ++totals.scored;
      line += fmt::format(", {}", *next++);
    }
    out.write(line + "]}\n");
    ++totals.sequences;
    totals.tokens += static_cast<std::int64_t>(tokens.size());
  }
}

}  // namespace

ExitCode run_score(const ScoreOptions& options, const Invocation& invocation) {
  only_one_process("score");
  check_new_file(options.out);
  InputEncoder encoder(options.model.path, options.chat_template, std::nullopt);
  if (invocation.dry_run) {
    const auto vocab_size = vocab_size_of(options.model.path);
    Totals totals;
    read_records(options.data, [&](const Record& record) {
      totals.tokens += static_cast<std::int64_t>(read_sequence(record, vocab_size, encoder).tokens.size());
      ++totals.sequences;
    });
    fmt::print("{} sequences, {} tokens\n", totals.sequences, totals.tokens);
    return ExitCode::kDone;
  }

  AtomicFile out(options.out);
  const auto loaded = load_model(options.model.path, options.device, options.dtype, {}, options.adapter);
  const auto& decoder = *loaded.model.decoder;
  const auto start = std::chrono::steady_clock::now();
  Totals totals;
  {
    Progress progress;
    std::vector<Sequence> pending;
    std::int64_t pending_tokens = 0;
    const auto score_pending = [&] {
      write_scores(pending, logprobs_of(decoder, pending), out, totals);
      pending.clear();
      pending_tokens = 0;
      progress.update(fmt::format("scoring: {} sequences, {} tokens", totals.sequences, totals.tokens));
    };
    read_records(options.data, [&](const Record& record) {
      auto sequence = read_sequence(record, decoder.vocab_size(), encoder);
      const auto tokens = static_cast<std::int64_t>(sequence.tokens.size());
      if (pending_tokens + tokens > kTokensPerPack) score_pending();
      pending.push_back(std::move(sequence));
      pending_tokens += tokens;
    });
    score_pending();
  }
  if (totals.sequences == 0) fail_data("{}: no record to score", options.data.string());
  out.commit();

  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  log_info("scored {} sequences, {} tokens in {:.1f} s ({:.0f} tokens/s); mean log-probability {:.4f}; written to {}",
           totals.sequences, totals.tokens, elapsed.count(), static_cast<double>(totals.tokens) / elapsed.count(),
           totals.scored == 0 ? 0.0 : totals.logprob / static_cast<double>(totals.scored), options.out.string());
  return ExitCode::kDone;
}

}  // namespace sluice
