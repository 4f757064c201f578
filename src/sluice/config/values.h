// SPDX-License-Identifier: Apache-2.0
// The values of settings as text: read, checked against their declaration, and written so that they read back the same.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "sluice/core/options.h"

namespace sluice {

// "a number", "a list of integers, or none", "one of cosine, linear": what the declaration lets a value be.
std::string expected_value(const Option& option);

// "NUMBER", "N", "PATH", "cosine|linear": the same for a column of --help.
std::string value_placeholder(const Option& option);

// "--optim.lr"; "--dry-run" for one that no file holds.
std::string flag_of(const Option& option);

// Reads one value from plain text, as typed on a command line. Usage error, which begins with `where`, if it is no such
// value. `none` clears an optional; a list is separated by commas.
Scalars parse_values(const Option& option, std::string_view text, std::string_view where);

// Checks type, range and choices, widens integers to numbers, and sets the field. Usage error that begins with `where`.
void set_option(const Option& option, Scalars values, std::string_view where);

// By an option's name, where its value was given: "run.toml:14: optim.lr", "--optim.lr". A command's operand has none.
using Origins = std::map<std::string, std::string>;

// One value in TOML. Numbers have the fewest digits that read back to the same bits.
std::string to_toml(const Scalar& scalar);

// The right side of `key = value` in TOML; an empty optional is "none".
std::string to_toml(const Option& option, const Scalars& values);

// The same for people: text without quotes, but for an empty one.
std::string to_plain(const Option& option, const Scalars& values);

}  // namespace sluice
