// SPDX-License-Identifier: Apache-2.0
#include "sluice/config/app.h"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <span>
#include <typeinfo>

#include "sluice/config/suggest.h"
#include "sluice/config/writer.h"
#include "sluice/core/log.h"

namespace sluice {
namespace {

using Arguments = std::span<const std::string>;

void print(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

std::string program_help(const Program& program) {
  std::size_t width = std::string_view("completion").size();
  for (const auto& command : program.commands) width = std::max(width, command.name.size());
  std::string out = "Usage: sluice COMMAND [run.toml ...] [--section.key value ...]\n\nCommands:\n";
  for (const auto& command : program.commands)
    out += fmt::format("  {:<{}}  {}\n", command.name, width, command.summary);
  out += fmt::format("  {:<{}}  {}\n", "completion", width, "print the completion script of a shell (bash)");
  return out + "\nsluice COMMAND --help lists a command's options; sluice --version names this build.\n";
}

std::string command_help(const Command& command, const OptionList& list, std::string_view section) {
  return fmt::format(
      "Usage: sluice {} [run.toml ...] [--section.key value ...]\n\n{}\n{}\n"
      "An option also goes as section.key=value. Lists are separated by commas; `none` clears; --no-KEY turns a switch "
      "off.\n",
      command.name, command.summary, option_help(list, section));
}

std::string version_line(const Program& program) {
  return fmt::format("sluice {}{}{}\n", version(), program.libtorch_version.empty() ? "" : ", libtorch ",
                     program.libtorch_version);
}

ExitCode run_command(const Command& command, Arguments arguments) {
  const auto bound = command.bind();
  const auto& list = bound->list();
  if (const auto help = find_help(list, arguments); help.wanted) {
    print(command_help(command, list, help.section));
    return ExitCode::kDone;
  }
  const auto origins = apply_command_line(list, arguments);
  const auto common = bound->common();
  const auto resolved = to_toml(list);
  if (common.print_config) {
    print(resolved);
    return ExitCode::kDone;
  }
  check_required(list);
  check_inputs(list, origins);
  if (common.quiet) set_log_level(LogLevel::kWarning);
  return bound->run({common.dry_run, resolved, changed_settings(list)});
}

ExitCode run_completion(const Program& program, Arguments arguments) {
  if (arguments.size() != 1 || arguments[0] != "bash") fail_usage("completion: expected the name of a shell: bash");
  print(bash_completion(program));
  return ExitCode::kDone;
}

// ": did you mean sft?" for a mistyped command, or another program's name for it; what to do instead if none is near.
std::string command_suggestion(const Program& program, std::string_view unknown) {
  std::vector<std::string_view> spellings;
  for (const auto& command : program.commands) {
    spellings.push_back(command.name);
    spellings.insert(spellings.end(), command.synonyms.begin(), command.synonyms.end());
  }
  const auto near = nearest(unknown, spellings);
  for (const auto& command : program.commands) {
    if (near == command.name) return fmt::format(": did you mean {}?", near);
    if (std::ranges::count(command.synonyms, near) == 0) continue;
    return fmt::format(": did you mean {} (called {} elsewhere)?", command.name, near);
  }
  return "; sluice --help lists all";
}

ExitCode dispatch(const Program& program, Arguments arguments) {
  if (arguments.empty()) fail_usage("no command given; sluice --help lists them");
  const auto& name = arguments[0];
  if (name == "--help" || name == "-h" || name == "help") {
    print(program_help(program));
    return ExitCode::kDone;
  }
  if (name == "--version" || name == "version") {
    print(version_line(program));
    return ExitCode::kDone;
  }
  if (name == "completion") return run_completion(program, arguments.subspan(1));
  for (const auto& command : program.commands) {
    if (command.name == name) return run_command(command, arguments.subspan(1));
  }
  fail_usage("unknown command \"{}\"{}", name, command_suggestion(program, name));
}

std::string type_name(const std::exception& error) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(typeid(error).name(), nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : typeid(error).name();
  std::free(demangled);
  return name;
}

int report(ExitCode code, std::string_view message, const std::exception& error, bool debug) {
  fmt::print(stderr, "error: {}\n", message);
  if (debug) fmt::print(stderr, "  [{}, exit code {}]\n", type_name(error), static_cast<int>(code));
  return static_cast<int>(code);
}

// Other libraries put a place in their source before what they say, and a stack trace behind; shown on request.
std::string_view message_alone(std::string_view text) {
  text = text.substr(0, text.find('\n'));
  const auto place_end = text.starts_with("[enforce fail at ") ? text.find("] ") : std::string_view::npos;
  return place_end == std::string_view::npos ? text : text.substr(place_end + 2);
}

}  // namespace

int run_program(const Program& program, const std::vector<std::string>& arguments) {
  const bool debug = std::find(arguments.begin(), arguments.end(), "--debug") != arguments.end();
  try {
    const auto code = dispatch(program, arguments);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      fail(ExitCode::kRuntime, "cannot write to standard output");
    return static_cast<int>(code);
  } catch (const Error& error) {
    return report(error.code(), error.what(), error, debug);
  } catch (const std::bad_alloc& error) {
    return report(ExitCode::kMemory, "out of memory", error, debug);
  } catch (const std::filesystem::filesystem_error& error) {
    const bool denied = error.code() == std::errc::permission_denied;
    const auto text = debug ? error.what() : fmt::format("{}: {}", error.path1().string(), error.code().message());
    return report(denied ? ExitCode::kData : ExitCode::kRuntime, text, error, debug);
  } catch (const std::exception& error) {
    const bool memory = program.is_out_of_memory && program.is_out_of_memory(error);
    const auto text = debug ? std::string_view(error.what()) : message_alone(error.what());
    return report(memory ? ExitCode::kMemory : ExitCode::kRuntime,
                  fmt::format("{}{}", memory ? "out of memory: " : "", text), error, debug);
  }
}

}  // namespace sluice
