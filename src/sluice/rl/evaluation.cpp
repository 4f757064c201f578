// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/evaluation.h"

#include <algorithm>
#include <numeric>

namespace sluice {

double pass_at_k(std::int64_t n, std::int64_t right, std::int64_t k) {
  double none_right = 1;
  for (std::int64_t i = 0; i < k; ++i) {
    none_right *= static_cast<double>(std::max<std::int64_t>(n - right - i, 0)) / static_cast<double>(n - i);
  }
  return 1 - none_right;
}

nlohmann::ordered_json evaluate(Engine& engine, const std::vector<Prompt>& prompts, Rewards& rewards,
                                Surroundings* surroundings, const GenerationSettings& settings) {
  std::vector<std::size_t> all(prompts.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  auto groups = sample_groups(engine, prompts, all, settings, /*first_stream=*/0, surroundings);
  judge(groups, prompts, rewards);
  double average = 0, tokens = 0, truncated = 0, answers = 0;
  std::int64_t failed = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> judged;  // answers of a prompt, those that are right
  for (const auto& group : groups) {
    double sum = 0;
    std::int64_t count = 0, right = 0;
    for (const auto& response : group.responses) {
      tokens += static_cast<double>(response.completion.logprobs.size());
      truncated += response.completion.finish_reason == FinishReason::kLength ? 1 : 0;
      answers += 1;
      if (!response.verdict) {
        ++failed;
        continue;
      }
      ++count;
      sum += response.verdict->parts.front();
      right += response.verdict->parts.front() >= 1 ? 1 : 0;
    }
    if (count == 0) continue;
    average += sum / static_cast<double>(count);
    judged.emplace_back(count, right);
  }
  const auto groups_judged = static_cast<double>(std::max<std::size_t>(judged.size(), 1));
  nlohmann::ordered_json values;
  values[fmt::format("eval/avg@{}", settings.samples)] = average / groups_judged;
  for (std::int64_t k = 1; k <= settings.samples; k *= 2) {
    double pass = 0;
    for (const auto& [count, right] : judged) pass += pass_at_k(count, right, std::min(k, count));
    values[fmt::format("eval/pass@{}", k)] = pass / groups_judged;
  }
  values["eval/length_mean"] = tokens / answers;
  values["eval/truncated_frac"] = truncated / answers;
  values["eval/failed"] = failed;
  return values;
}

}  // namespace sluice
