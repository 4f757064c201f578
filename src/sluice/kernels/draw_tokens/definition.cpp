// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/draw_tokens/draw_tokens.h"
#include "sluice/kernels/draw_tokens/inputs.h"

namespace sluice {

Tensor draw_tokens_definition(const Tensor& logits, std::int64_t drawable, const Tensor& settings,
                              const std::optional<Tensor>& seen) {
  check_float_type("draw_tokens", "logits", logits);
  check_draw_tokens(logits, drawable, settings, seen);
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  const auto setting = settings.split(1, /*dim=*/1);  // in the order of DrawSettings, each [N, 1]
  const auto &temperature = setting[0], &top_k = setting[1], &top_p = setting[2], &min_p = setting[3],
             &penalty = setting[4], &random = setting[5];
  const auto wide = logits.to(kDouble);
  auto scores = wide.narrow(1, 0, drawable);
  if (seen) scores = at::where(*seen, at::where(scores > 0, scores / penalty, scores * penalty), scores);
  const auto is_greedy = temperature == 0;
  const auto largest = scores.amax(1, /*keepdim=*/true);

  // Logarithms of the weights, the largest first, with minus infinity for what is dropped.
  const auto log_weights = (scores - largest) / temperature.masked_fill(is_greedy, 1);
  const auto [sorted, order] = log_weights.sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
  const auto k = top_k.masked_fill(top_k == 0, static_cast<double>(drawable)).clamp_max(static_cast<double>(drawable));
  auto left = sorted.masked_fill(sorted < sorted.gather(1, k.to(kLong) - 1), -kInfinity);
  const auto share = left.softmax(1);
  const auto before = share.cumsum(1) - share;  // of all that are larger
  auto dropped = before >= top_p.masked_fill(top_p == 1, kInfinity);
  dropped.select(1, 0).fill_(false);  // at least one stays
  left = left.masked_fill(dropped.logical_or(sorted < min_p.log()), -kInfinity);
  const auto kept = at::empty_like(left).scatter_(1, order, left);  // ids in rising order

  const auto log_shares = kept.log_softmax(1);
  const auto through = log_shares.exp().cumsum(1), total = through.narrow(1, drawable - 1, 1);
  // Rounding must not lead behind the last id that has a weight.
  const auto drawn = (through <= random * total).sum(1, /*keepdim=*/true).minimum((through < total).sum(1, true));
  const auto id = at::where(is_greedy, scores.argmax(1, true), drawn.clamp_max(drawable - 1));

  const auto log_sum = wide.logsumexp(1, true);
  const auto of_model = wide.gather(1, id) - log_sum;
  const auto as_drawn = at::where(is_greedy, of_model, log_shares.gather(1, id));
  const auto damaged = (log_sum + largest).isfinite().logical_not();
  const auto logprobs = at::cat({as_drawn, of_model}, 1).masked_fill(damaged, std::nan(""));
  return at::cat({id.to(kDouble), logprobs}, 1);
}

}  // namespace sluice
