// SPDX-License-Identifier: Apache-2.0
// The command line of a subcommand: `[run.toml ...] [--section.key value | --section.key=value | section.key=value
// ...]`. Everything is applied in order and the last one wins, so files come first. docs/cli.md is the user's view.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "sluice/config/values.h"
#include "sluice/core/options.h"

namespace sluice {

// Options of every subcommand. They are typed, never saved.
struct CommonOptions {
  bool dry_run = false;
  bool print_config = false;
  bool quiet = false;
  bool debug = false;
  void describe(OptionList& option);
};

// Whether help was asked for, and of which section ("" for all).
struct HelpRequest {
  bool wanted = false;
  std::string section;
};
HelpRequest find_help(const OptionList& list, std::span<const std::string> arguments);

// Reads files and settings into `list`. Usage error that names the option, or file and line.
Origins apply_command_line(const OptionList& list, std::span<const std::string> arguments);

// Usage error if an option that is declared `required` is still empty.
void check_required(const OptionList& list);

// Data error that says where it was given if nothing is at a path that is declared an `input`.
void check_inputs(const OptionList& list, const Origins& origins);

}  // namespace sluice
