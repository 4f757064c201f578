// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/choices.h"

#include <algorithm>

#include "sluice/core/error.h"

namespace sluice {

Tensor ChoiceRecord::take(const Tensor& live, const ForwardContext& context) {
  const auto at = std::ranges::find(taken_.blocks, context.block);
  SLUICE_CHECK(at != taken_.blocks.end(), "replay: block {} chooses, and no choice of it was kept", context.block);
  const auto known = taken_.chosen.select(1, at - taken_.blocks.begin())
                         .narrow(0, context.first_token, live.size(0))
                         .to(live.options());
  SLUICE_CHECK(known.sizes() == live.sizes(), "replay: block {} has choices {} for tokens that need {}", context.block,
               describe(known), describe(live));
  const auto is_known = known.select(1, 0) >= 0;  // [t]
  const auto differs = (std::get<0>(known.sort(1)) != std::get<0>(live.sort(1))).any(1) & is_known;
  rows_ += is_known.sum().item<std::int64_t>();
  differing_ += differs.sum().item<std::int64_t>();
  return at::where(is_known.unsqueeze(1), known, live);
}

Tensor ChoiceRecord::follow(const Tensor& live, const ForwardContext& context) {
  if (takes()) return take(live, context);
  const auto block = static_cast<std::size_t>(context.block);
  kept_.resize(std::max(kept_.size(), block + 1));
  const auto own = live.to(at::kShort);
  kept_[block] = context.first_token == 0 ? own : at::cat({kept_[block], own});
  return live;
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
