// SPDX-License-Identifier: Apache-2.0
// The program's frame: which command runs with which options, what it prints, and with which status it ends.
#include "sluice/config/app.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <new>
#include <stdexcept>

#include "sluice/config/example_options.h"
#include "sluice/config/toml_reader.h"
#include "sluice/config/writer.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/core/testing.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Seen {
  ExampleOptions options;
  Invocation invocation;
} seen;

ExitCode run_sft(const ExampleOptions& options, const Invocation& invocation) {
  seen = {options, invocation};
  return ExitCode::kDone;
}

struct NoOptions {
  void describe(OptionList&) {}
};
struct FileOptions {
  std::filesystem::path path;
  void describe(OptionList& option) { option("path", path, "what to read", {.input = true}); }
};
struct ReadOptions {
  std::filesystem::path file;
  std::optional<std::filesystem::path> second;
  std::vector<FileOptions> files;
  void describe(OptionList& option) {
    option("file", file, "read first", {.input = true});
    option("second", second, "then", {.input = true});
    option("files", files, "at last");
  }
};
ExitCode run_read(const ReadOptions&, const Invocation&) { return ExitCode::kDone; }

struct OutOfDeviceMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};
ExitCode run_out_of_memory(const NoOptions&, const Invocation&) { throw std::bad_alloc(); }
ExitCode run_out_of_device_memory(const NoOptions&, const Invocation&) {
  throw OutOfDeviceMemory("tried 3 GiB\nframe #0");
}
ExitCode run_unforeseen(const NoOptions&, const Invocation&) { throw std::logic_error("index 3 of 2\nframe #0: a.so"); }
ExitCode run_denied(const NoOptions&, const Invocation&) {
  throw std::filesystem::filesystem_error("status", "locked/a", std::make_error_code(std::errc::permission_denied));
}
ExitCode run_bad_data(const NoOptions&, const Invocation&) { fail_data("a.jsonl:3: no messages"); }
ExitCode run_requeue(const NoOptions&, const Invocation&) { return ExitCode::kRequeue; }

struct Outcome {
  int status;
  std::string out, err;
};

Outcome sluice(const std::vector<std::string>& arguments) {
  const Program program{
      .libtorch_version = "2.11.0",
      .commands = {command("sft", "fine-tune on conversations", run_sft, {"train", "finetune"}),
                   command("read", "read a file", run_read), command("memory", "run out of it", run_out_of_memory),
                   command("device", "run out of its memory", run_out_of_device_memory),
                   command("unforeseen", "throw", run_unforeseen), command("denied", "may not read", run_denied),
                   command("data", "read bad data", run_bad_data), command("requeue", "stop early", run_requeue)},
      .is_out_of_memory = [](const std::exception& e) {
        return dynamic_cast<const OutOfDeviceMemory*>(&e) != nullptr;
      }};
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int status = run_program(program, arguments);
  return {status, ::testing::internal::GetCapturedStdout(), ::testing::internal::GetCapturedStderr()};
}

TEST(App, RunsTheCommandWithItsOptions) {
  const auto outcome = sluice({"sft", "--model", "tiny", "--optim.lr", "2e-5", "--dry-run"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(seen.options.model.path, "tiny");
  EXPECT_EQ(seen.options.optim.lr, 2e-5);
  EXPECT_TRUE(seen.invocation.dry_run);
  EXPECT_THAT(seen.invocation.changed, HasSubstr("optim.lr    2e-05 (default 1e-05)\n"));
}

TEST(App, PrintsAConfigurationThatReproducesTheRun) {
  const auto printed = sluice({"sft", "--model", "tiny", "--optim.lr", "0.3", "--print-config"});
  EXPECT_EQ(printed.status, 0);
  ExampleOptions again;
  const OptionList list(again);
  apply_toml(list, printed.out, "printed");
  EXPECT_EQ(again.optim.lr, 0.3);
  EXPECT_EQ(to_toml(list), printed.out);
  sluice({"sft", "--model", "tiny", "--optim.lr", "0.3"});
  EXPECT_EQ(seen.invocation.resolved_toml, printed.out);
}

TEST(App, HelpsOnEveryLevel) {
  EXPECT_THAT(sluice({"--help"}).out, HasSubstr("  sft         fine-tune on conversations\n"));
  const auto help = sluice({"sft", "--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.out, StartsWith("Usage: sluice sft [run.toml ...]"));
  EXPECT_THAT(help.out, HasSubstr("--optim.warmup_steps N"));
  EXPECT_THAT(help.out, HasSubstr("--dry-run"));
  const auto section = sluice({"sft", "--help", "optim"});
  EXPECT_THAT(section.out, HasSubstr("--optim.lr"));
  EXPECT_THAT(section.out, Not(HasSubstr("--seed")));
  EXPECT_EQ(sluice({"sft", "--no-such-option", "--help"}).status, 0);
}

TEST(App, NamesItsVersionCommitAndLibtorch) {
  EXPECT_THAT(sluice({"--version"}).out, ::testing::MatchesRegex("sluice [0-9.]+ \\([0-9a-z]+\\), libtorch 2.11.0\n"));
}

TEST(App, RefusesAnUnknownCommandAndSuggestsTheNearest) {
  const auto outcome = sluice({"stf"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.err, "error: unknown command \"stf\": did you mean sft?\n");
  EXPECT_EQ(sluice({}).status, 2);
  EXPECT_EQ(sluice({"trian"}).err, "error: unknown command \"trian\": did you mean sft (called train elsewhere)?\n");
  EXPECT_EQ(sluice({"serve"}).err, "error: unknown command \"serve\"; sluice --help lists all\n");
}

TEST(App, NamesTheOptionOfAPathWhereNothingIs) {
  const auto here = std::filesystem::current_path().string();
  EXPECT_EQ(sluice({"read"}).status, 0);
  EXPECT_EQ(sluice({"read", "--file", here, "--second", "none"}).status, 0);
  const auto relative = sluice({"read", "--file", "no/such.jsonl", "--dry-run"});
  EXPECT_EQ(relative.status, 3);
  EXPECT_EQ(relative.err, "error: --file: no/such.jsonl: no such file or folder in " + here + "\n");
  EXPECT_EQ(sluice({"read", "--file", here, "--second", "/no/such"}).err,
            "error: --second: /no/such: no such file or folder\n");
  EXPECT_EQ(sluice({"read", "second=/no/such"}).err, "error: second: /no/such: no such file or folder\n");
  EXPECT_EQ(sluice({"read", "--files", "[{path = '/no/such'}]"}).err,
            "error: --files: files.0.path: /no/such: no such file or folder\n");
}

// The last one wins, whichever way it came.
TEST(App, NamesTheLineThatGaveAPathWhereNothingIs) {
  const TemporaryFolder folder;
  const auto first = (folder / "first.toml").string(), second = (folder / "second.toml").string();
  write_file(first, "file = '/none'\nsecond = '/none'\n");
  write_file(second, "second = '/no'\n\n[[files]]\npath = '/nowhere'\n");
  EXPECT_EQ(sluice({"read", first, second}).err,
            fmt::format("error: {}:1: file: /none: no such file or folder\n", first));
  EXPECT_EQ(sluice({"read", first, second, "--file", first}).err,
            fmt::format("error: {}:1: second: /no: no such file or folder\n", second));
  EXPECT_EQ(sluice({"read", first, second, "--file", first, "--second", "/here"}).err,
            "error: --second: /here: no such file or folder\n");
  EXPECT_EQ(sluice({"read", first, second, "--file", first, "--second", "none"}).err,
            fmt::format("error: {}:4: files.0.path: /nowhere: no such file or folder\n", second));
}

TEST(App, EndsWithTwoForAMistakeInTheSettings) {
  const auto outcome = sluice({"sft", "--learning_rat", "1"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.err,
            "error: unknown option \"--learning_rat\": did you mean optim.lr (called learning_rate elsewhere)?\n");
  EXPECT_EQ(sluice({"sft"}).err, "error: model.path: required; give --model PATH or set it in a run file\n");
}

TEST(App, EndsWithTheCodeOfTheError) {
  EXPECT_EQ(sluice({"data"}).status, 3);
  EXPECT_EQ(sluice({"data"}).err, "error: a.jsonl:3: no messages\n");
  EXPECT_EQ(sluice({"denied"}).status, 3);
  EXPECT_EQ(sluice({"denied"}).err, "error: locked/a: Permission denied\n");
  EXPECT_EQ(sluice({"memory"}).status, 4);
  EXPECT_EQ(sluice({"device"}).status, 4);
  EXPECT_EQ(sluice({"device"}).err, "error: out of memory: tried 3 GiB\n");
  EXPECT_EQ(sluice({"requeue"}).status, 75);
}

TEST(App, SaysOneLineOfAnUnforeseenErrorAndAllOfItOnRequest) {
  const auto outcome = sluice({"unforeseen"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.err, "error: index 3 of 2\n");
  EXPECT_EQ(sluice({"unforeseen", "--debug"}).err,
            "error: index 3 of 2\nframe #0: a.so\n  [std::logic_error, exit code 1]\n");
}

TEST(App, KeepsWarningsWhenQuiet) {
  sluice({"requeue", "--quiet"});
  EXPECT_FALSE(log_shows(LogLevel::kInfo));
  EXPECT_TRUE(log_shows(LogLevel::kWarning));
  set_log_level(LogLevel::kInfo);
}

// What bash offers behind `words`, the last of which is being typed.
std::string completions(const std::vector<std::string>& words) {
  const TemporaryFolder folder;
  const auto script = folder / "completion.bash";
  std::string line;
  for (const auto& word : words) line += fmt::format("'{}' ", word);
  write_file(script, sluice({"completion", "bash"}).out +
                         fmt::format("COMP_WORDS=(sluice {})\nCOMP_CWORD={}\n_sluice\necho \"${{COMPREPLY[*]}}\"\n",
                                     line, words.size()));
  std::string output;
  std::FILE* pipe = ::popen(fmt::format("bash {} 2>&1", script.string()).c_str(), "r");
  for (std::array<char, 4096> part; std::fgets(part.data(), part.size(), pipe) != nullptr;) output += part.data();
  ::pclose(pipe);
  return output;
}

TEST(App, CompletesCommandsOptionsAndChoicesInBash) {
  if (std::system("command -v bash > /dev/null") != 0) GTEST_SKIP() << "no bash";
  EXPECT_EQ(completions({"sf"}), "sft\n");
  EXPECT_EQ(completions({"sft", "--optim.l"}), "--optim.lr\n");
  EXPECT_EQ(completions({"sft", "--no-data"}), "--no-data.packing\n");
  EXPECT_EQ(completions({"sft", "--optim.schedule", "co"}), "constant cosine\n");
  EXPECT_EQ(completions({"sft", "--data.sources.0.p"}), "--data.sources.0.path\n");
  EXPECT_EQ(sluice({"completion", "fish"}).status, 2);
}

}  // namespace
}  // namespace sluice
