// SPDX-License-Identifier: Apache-2.0
// Reads TOML into declared options. Every error is a usage error that names file, line and key. Tables merge with what
// is set already, arrays replace it.
#pragma once

#include <filesystem>
#include <string_view>

#include "sluice/config/values.h"
#include "sluice/core/options.h"

namespace sluice {

// Reads `text`; `source` names it in errors.
Origins apply_toml(const OptionList& list, std::string_view text, std::string_view source);

Origins apply_toml_file(const OptionList& list, const std::filesystem::path& path);

// Sets one list or list of tables from a TOML array, as in `--optim.betas '[0.9, 0.95]'`.
void apply_toml_array(const Option& option, std::string_view text, std::string_view where);
Origins apply_toml_array(const OptionTables& tables, std::string_view text, std::string_view where);

}  // namespace sluice
