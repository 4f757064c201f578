// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/dataset.h"

#include <algorithm>

#include "sluice/core/error.h"
#include "sluice/core/log.h"

namespace sluice {
namespace {

Sample piece(const Sample& sample, std::size_t begin, std::size_t size) {
  const auto cut = [&](const auto& values) {
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
    return std::decay_t<decltype(values)>(first,
                                          first + static_cast<std::ptrdiff_t>(std::min(size, values.size() - begin)));
  };
  return {cut(sample.tokens), cut(sample.loss_mask), sample.place, 0};
}

}  // namespace

void Dataset::add(Sample sample) {
  counts_.samples += 1;
  counts_.tokens += std::ssize(sample.tokens);
  counts_.trained_tokens += sample.trained_tokens();
  samples_.push_back(std::move(sample));
}

Dataset Dataset::load(const std::vector<std::filesystem::path>& files, const SampleMaker& maker,
                      const DatasetOptions& options) {
  if (options.max_tokens < 2) fail_usage("a sample needs at least 2 tokens, and max_tokens is {}", options.max_tokens);
  const auto max_tokens = static_cast<std::size_t>(options.max_tokens);
  Dataset dataset;
  auto& counts = dataset.counts_;
  for (const auto& file : files) {
    read_records(file, [&](const Record& record) {
      auto sample = maker.make(record);
      ++counts.records;
      counts.literal_specials += sample.literal_specials > 0 ? 1 : 0;
      const bool over_long = sample.tokens.size() > max_tokens;
      counts.over_long += over_long ? 1 : 0;
      if (over_long && options.over_long == OverLong::kDrop) return;
      bool trained = false;
      const auto add = [&](Sample part) {
        if (part.trained_tokens() == 0) return;
        trained = true;
        dataset.add(std::move(part));
      };
      if (over_long) {
        const auto end = options.over_long == OverLong::kTruncate ? max_tokens : sample.tokens.size();
        for (std::size_t begin = 0; begin < end; begin += max_tokens) add(piece(sample, begin, max_tokens));
      } else {
        add(std::move(sample));
      }
      counts.untrained += trained ? 0 : 1;
    });
  }
  if (counts.records == 0)
    fail_data("{}: no record found", files.empty() ? "no data file given" : files.front().string());
  const auto lines = dataset.summary(options);
  if (counts.samples == 0) {
    fail_data("{}: no sample is left to train on: {}", files.front().string(),
              fmt::join(lines.begin() + 1, lines.end(), "; "));
  }
  for (const auto& line : lines) log_info("{}", line);
  return dataset;
}

std::vector<std::string> Dataset::summary(const DatasetOptions& options) const {
  const auto& c = counts_;
  std::vector<std::string> lines = {fmt::format("data: {} samples of {} records, {} tokens, {} of them trained",
                                                c.samples, c.records, c.tokens, c.trained_tokens)};
  if (c.untrained > 0) {
    lines.push_back(fmt::format("dropped {} of {} records: no token to train on within {} tokens", c.untrained,
                                c.records, options.max_tokens));
  }
  if (c.over_long > 0) {
    static constexpr const char* kDone[] = {"truncated", "dropped", "split"};
    lines.push_back(fmt::format("{} {} of {} records: longer than {} tokens",
                                kDone[static_cast<int>(options.over_long)], c.over_long, c.records,
                                options.max_tokens));
  }
  if (c.literal_specials > 0) {
    lines.push_back(
        fmt::format("{} of {} records hold text that looks like a control token (\"<|im_end|>\"); it stays text",
                    c.literal_specials, c.records));
  }
  return lines;
}

}  // namespace sluice
