// SPDX-License-Identifier: Apache-2.0
// The program `sluice`: finds the subcommand, fills its options, runs it, and turns every way to end into an exit
// status.
//
//   struct InspectOptions { ModelOptions model; void describe(OptionList& option) {...} };
//   ExitCode run_inspect(const InspectOptions& options, const Invocation& invocation);
//   int main(int argc, char** argv) {
//     const Program program{.libtorch_version = TORCH_VERSION,
//                           .commands = {command("inspect", "show what a model folder holds", run_inspect)}};
//     return run_program(program, {argv + 1, argv + argc});
//   }
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sluice/config/command_line.h"
#include "sluice/core/error.h"
#include "sluice/core/options.h"

namespace sluice {

// What a command learns besides its own options.
struct Invocation {
  bool dry_run;               // check, print sizes, run nothing
  std::string resolved_toml;  // every setting; alone reproduces the run; goes into the run folder as config.toml
  std::string changed;        // the settings that differ from their defaults, for the head of the log
};

// A command's options together with their declaration, which --help and completion read too.
class BoundCommand {
 public:
  virtual ~BoundCommand() = default;
  virtual const OptionList& list() const = 0;
  virtual CommonOptions common() const = 0;
  virtual ExitCode run(const Invocation& invocation) const = 0;
};

struct Command {
  std::string_view name;
  std::string_view summary;                             // one line, no full stop
  std::vector<std::string_view> synonyms;               // other programs' names; an error about one names this command
  std::function<std::unique_ptr<BoundCommand>()> bind;  // fresh options with their defaults
};

template <typename Options>
using RunCommand = ExitCode (*)(const Options& options, const Invocation& invocation);

// A command that fills an Options, a struct with describe(), and runs `run` with it.
template <typename Options>
Command command(std::string_view name, std::string_view summary, RunCommand<Options> run,
                std::vector<std::string_view> synonyms = {}) {
  class Bound : public BoundCommand {
   public:
    explicit Bound(RunCommand<Options> function) : function_(function), list_(options_) { common_.describe(list_); }
    const OptionList& list() const override { return list_; }
    CommonOptions common() const override { return common_; }
    ExitCode run(const Invocation& invocation) const override { return function_(options_, invocation); }

   private:
    RunCommand<Options> function_;
    Options options_;
    CommonOptions common_;
    OptionList list_;
  };
  return {name, summary, std::move(synonyms), [run] { return std::make_unique<Bound>(run); }};
}

struct Program {
  std::string_view libtorch_version = {};  // for --version; empty if it is not linked
  std::vector<Command> commands = {};      // in the order of --help
  // Whether an exception of another library says that memory ran out. std::bad_alloc is known.
  std::function<bool(const std::exception&)> is_out_of_memory = {};
};

// Runs `sluice arguments...` and returns the exit status. Throws nothing: errors go to standard error.
int run_program(const Program& program, const std::vector<std::string>& arguments);

// "0.1.0 (0123456789ab)": this build's version and commit.
std::string version();

// The bash script of `sluice completion bash`.
std::string bash_completion(const Program& program);

}  // namespace sluice
