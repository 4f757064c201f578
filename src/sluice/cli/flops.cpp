// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/flops.h"

#include "sluice/cli/model_source.h"
#include "sluice/models/family.h"
#include "sluice/train/flops.h"

namespace sluice {

ExitCode run_flops(const FlopsOptions& options, const Invocation&) {
  const auto [config, where] = read_model_source("flops", options.preset, options.config);
  const auto model = build_model(config, where);
  const std::vector<std::int64_t> lengths{options.seq_len};
  const auto operations = model.decoder->forward_operations(lengths, options.seq_len);
  const auto sum = total(operations);
  const auto print_row = [&](const std::string& part, double forward) {
    const auto each = forward / static_cast<double>(options.seq_len) / 1e9;
    fmt::print("{:<36} {:>8.3f} {:>9.3f} {:>6.1f}%\n", part, each, kTrainingFactor * each, 100 * forward / sum);
  };
  fmt::print("{}, sequences of {} tokens, GFLOP a token\n", where, options.seq_len);
  fmt::print("{:<36} {:>8} {:>9} {:>7}\n", "part", "forward", "training", "share");
  for (const auto& [part, forward] : operations) print_row(part, forward);
  print_row("all", sum);
  return ExitCode::kDone;
}

}  // namespace sluice
