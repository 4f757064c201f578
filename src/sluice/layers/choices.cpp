// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/choices.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "sluice/core/error.h"

namespace sluice {
namespace {

// "[0, 3, -1]"
std::string row_text(const Tensor& row) {
  const auto values = row.to(at::kCPU, kLong).contiguous();
  return fmt::format("[{}]", fmt::join(std::span(values.const_data_ptr<std::int64_t>(), values.numel()), ", "));
}

}  // namespace

Tensor ChoiceRecord::follow(const Tensor& live, const Tensor& options, ChoiceOrder order,
                            const ForwardContext& context) {
  const auto at = std::ranges::find(taken_.blocks, context.block);
  SLUICE_CHECK(at != taken_.blocks.end(), "replay: block {} chooses, and no choice of it was kept", context.block);
  const auto known = taken_.chosen.select(1, at - taken_.blocks.begin())
                         .narrow(0, context.first_token, live.size(0))
                         .to(live.options());
  SLUICE_CHECK(known.sizes() == live.sizes(), "replay: block {} has choices {} for tokens that need {}", context.block,
               describe(known), describe(live));
  const auto is_known = known.select(1, 0) >= 0;  // [t]
  const auto sorted = std::get<0>(known.sort(1)), sorted_live = std::get<0>(live.sort(1));
  const auto differs = (sorted != sorted_live).any(1) & is_known;
  const auto& ordered = order == ChoiceOrder::kRising ? known : sorted;
  const auto not_rising = (ordered.diff(1, 1) <= 0) & (ordered.narrow(1, 1, ordered.size(1) - 1) >= 0);
  const auto unfit = (((known >= 0) != (live >= 0)).any(1) | not_rising.any(1) | (known >= options).any(1)) & is_known;
  const auto counts = at::stack({is_known.sum(), differs.sum(), unfit.sum()}).cpu();
  const auto* count = counts.const_data_ptr<std::int64_t>();
  if (count[2] > 0) {
    const auto first = unfit.nonzero()[0].item<std::int64_t>();
    fail(ExitCode::kRuntime,
         "replay: block {}: {} of {} tokens have what is no choice of {}{}; the first, token {} of the pack, has {} of "
         "{} options, and would choose {} now",
         context.block, count[2], count[0], live.size(1), order == ChoiceOrder::kRising ? " in rising order" : "",
         context.first_token + first, row_text(known[first]),
         options.expand({live.size(0), 1})[first].item<std::int64_t>(), row_text(live[first]));
  }
  rows_ += count[0];
  differing_ += count[1];
  return at::where(is_known.unsqueeze(1), known, live);
}

void ChoiceRecord::keep(const Tensor& live, const ForwardContext& context) {
  const auto block = static_cast<std::size_t>(context.block);
  kept_.resize(std::max(kept_.size(), block + 1));
  const auto own = live.to(at::kShort);
  kept_[block] = context.first_token == 0 ? own : at::cat({kept_[block], own});
}

Choices ChoiceRecord::kept() const {
  Choices all;
  std::vector<Tensor> chosen;
  for (std::size_t block = 0; block < kept_.size(); ++block) {
    if (!kept_[block].defined()) continue;
    all.blocks.push_back(static_cast<std::int64_t>(block));
    chosen.push_back(kept_[block]);
  }
  if (!chosen.empty()) all.chosen = at::stack(chosen, 1).cpu();
  return all;
}

}  // namespace sluice
