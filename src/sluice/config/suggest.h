// SPDX-License-Identifier: Apache-2.0
// What somebody probably meant by a name that does not exist.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sluice/core/options.h"

namespace sluice {

// The candidate nearest to `text`; empty if none is near: at most a third of its letters differ, or one begins the
// other.
std::string nearest(std::string_view text, const std::vector<std::string_view>& candidates);

// ": did you mean optim.lr?" for an unknown key such as "optim.lrr", "learning_rate" (another program's name) or
// "learning_rat"; what to do instead if nothing is near.
std::string suggestion(const OptionList& list, std::string_view unknown_key);
std::string section_suggestion(const OptionList& list, std::string_view unknown_section);

// Kebab to snake case: `warmup-steps` and `warmup_steps` are the same key.
std::string snake_case(std::string_view key);

}  // namespace sluice
