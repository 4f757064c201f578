// SPDX-License-Identifier: Apache-2.0
// What was chosen, written for a later run, for the head of a log, and for --help.
#pragma once

#include <string>
#include <string_view>

#include "sluice/core/options.h"

namespace sluice {

// All saved settings as a TOML file; reading it into fresh options gives the same values, bit for bit.
std::string to_toml(const OptionList& list);

// Settings that differ from their defaults, one aligned line each: "optim.lr  2e-05 (default 1e-05)".
std::string changed_settings(const OptionList& list);

// Every option of one section and those below it ("" for all), with value, sentence, unit and default, 100 columns
// wide.
std::string option_help(const OptionList& list, std::string_view section);

}  // namespace sluice
