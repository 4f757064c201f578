// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/config/app.h"
#include "sluice/rl/options.h"

namespace sluice {

// `sluice rl`: trains a model by rewards of its own answers, and exports the result to RUN/export.
ExitCode run_rl(const RlOptions& options, const Invocation& invocation);

}  // namespace sluice
