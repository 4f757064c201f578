// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/sft_data.h"

#include <algorithm>

#include "sluice/core/error.h"
#include "sluice/data/packing.h"

namespace sluice {
namespace {

void check_ids(const std::vector<Sample>& samples, std::int64_t vocab_size) {
  for (const auto& sample : samples) {
    const auto outside = std::find_if(sample.tokens.begin(), sample.tokens.end(),
                                      [&](const TokenId id) { return id < 0 || id >= vocab_size; });
    if (outside != sample.tokens.end()) {
      fail_data("{}: token {} is {}, outside the model's vocabulary of {}", sample.place,
                outside - sample.tokens.begin(), *outside, vocab_size);
    }
  }
}

// Moves a part of the samples, at least one and not all, from train to eval.
void split_off(SftData& data, double part, std::uint64_t seed) {
  const auto count = std::ssize(data.train);
  const auto kept_back =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(part * static_cast<double>(count)), 1, count - 1);
  const auto order = shuffled(count, seed, /*epoch=*/std::uint64_t{0} - 1);  // an epoch that no training reaches
  SftData divided;
  for (std::int64_t i = 0; i < count; ++i) {
    (i < kept_back ? divided.eval : divided.train).push_back(std::move(data.train[static_cast<std::size_t>(order[i])]));
  }
  data = std::move(divided);
}

}  // namespace

SftData load_sft_data(const SftOptions& options, std::int64_t vocab_size) {
  const auto tokenizer = Tokenizer::load(options.model.path);
  const SampleMaker maker(tokenizer, ChatTemplate::load(options.model.path, options.data.chat_template),
                          {.loss_on = options.data.loss_on,
                           .special = options.data.control_tokens ? SpecialTokens::kControl : SpecialTokens::kLiteral,
                           .enable_thinking = {}});
  const auto load = [&](const std::filesystem::path& file) {
    auto samples =
        Dataset::load({file}, maker, {.max_tokens = options.data.seq_len, .over_long = options.data.over_long})
            .samples();
    check_ids(samples, vocab_size);
    return samples;
  };
  SftData data{.train = load(options.data.path), .eval = {}};
  if (options.eval.data) {
    data.eval = load(*options.eval.data);
  } else if (options.eval.split > 0) {
    if (data.train.size() < 2) fail_data("{}: one sample cannot be split; drop eval.split", options.data.path.string());
    split_off(data, options.eval.split, static_cast<std::uint64_t>(options.seed));
  }
  return data;
}

}  // namespace sluice
