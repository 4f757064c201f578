// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/config/app.h"
#include "sluice/train/options.h"

namespace sluice {

// `sluice sft`: fine-tunes a model folder on conversations or text, and exports the result to RUN/export.
ExitCode run_sft(const SftOptions& options, const Invocation& invocation);

}  // namespace sluice
