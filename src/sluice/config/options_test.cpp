// SPDX-License-Identifier: Apache-2.0
// Options from files and from the command line: what is accepted, which one wins, and every error in its words.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "sluice/config/command_line.h"
#include "sluice/config/example_options.h"
#include "sluice/config/suggest.h"
#include "sluice/config/toml_reader.h"
#include "sluice/config/writer.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/testing.h"

namespace sluice {
namespace {

using Words = std::vector<std::string>;

class Options : public ::testing::Test {
 protected:
  ExampleOptions run;
  OptionList list{run};

  void type(const Words& words) { apply_command_line(list, words); }
  void read(std::string_view toml) { apply_toml(list, toml, "run.toml"); }
};

template <typename Action>
std::string usage_error(Action action) {
  return error_of(action, ExitCode::kUsage);
}

class OptionErrors : public Options {
 protected:
  std::string typing(const Words& words) {
    return usage_error([&] { type(words); });
  }
  std::string reading(std::string_view toml) {
    return usage_error([&] { read(toml); });
  }
};

TEST_F(Options, KeepTheirDefaultsWhenNothingIsGiven) {
  type({});
  EXPECT_EQ(run.optim.lr, 1e-5);
  EXPECT_EQ(run.seed, 42);
}

TEST_F(Options, TakeEachFormOfTheCommandLine) {
  type({"--optim.lr", "1e-4", "--seed=7", "optim.warmup_steps=30", "--optim.schedule", "linear"});
  EXPECT_EQ(run.optim.lr, 1e-4);
  EXPECT_EQ(run.seed, 7);
  EXPECT_EQ(run.optim.warmup_steps, 30);
  EXPECT_EQ(run.optim.schedule, ExampleSchedule::kLinear);
}

TEST_F(Options, TreatKebabAndSnakeCaseAlike) {
  type({"--optim.warmup-steps", "5"});
  EXPECT_EQ(run.optim.warmup_steps, 5);
  read("[optim]\nwarmup-steps = 6");
  EXPECT_EQ(run.optim.warmup_steps, 6);
}

TEST_F(Options, TakeNegativeNumbers) {
  type({"--seed", "-3"});
  EXPECT_EQ(run.seed, -3);
}

TEST_F(Options, SwitchFlagsOnAndOff) {
  type({"--no-data.packing"});
  EXPECT_FALSE(run.data.packing);
  type({"--data.packing"});
  EXPECT_TRUE(run.data.packing);
  type({"--data.packing", "false"});
  EXPECT_FALSE(run.data.packing);
  type({"data.packing=true"});
  EXPECT_TRUE(run.data.packing);
}

TEST_F(Options, HaveShortNamesForTheCommandLine) {
  type({"--model", "checkpoints/tiny"});
  EXPECT_EQ(run.model.path, "checkpoints/tiny");
}

TEST_F(Options, ClearWithNone) {
  type({"--optim.clip-norm", "none"});
  EXPECT_FALSE(run.optim.clip_norm.has_value());
  type({"--optim.clip-norm", "0.5"});
  EXPECT_EQ(run.optim.clip_norm, 0.5);
  read("optim.clip_norm = \"none\"");
  EXPECT_FALSE(run.optim.clip_norm.has_value());
}

TEST_F(Options, ReadListsSeparatedByCommasOrAsToml) {
  type({"--optim.betas", "0.8,0.99", "--tags", R"(["with, comma", "b"])"});
  EXPECT_EQ(run.optim.betas, (std::vector<double>{0.8, 0.99}));
  EXPECT_EQ(run.tags, (Words{"with, comma", "b"}));
  type({"--tags", "[]"});
  EXPECT_TRUE(run.tags.empty());
}

TEST(RepeatedOptions, TakeOneWholeTextEachTime) {
  struct Texts {
    std::vector<std::string> prompt;
    void describe(OptionList& option) { option("prompt", prompt, "what to continue", {.repeated = true}); }
  } texts;
  const OptionList list(texts);
  apply_command_line(list, std::vector<std::string>{"--prompt", "Hello, world", "--prompt=[1, 2]", "prompt=--x"});
  EXPECT_EQ(texts.prompt, (Words{"Hello, world", "[1, 2]", "--x"}));
}

TEST_F(Options, MergeTablesAndReplaceArrays) {
  read("tags = ['a', 'b']\n[optim]\nlr = 1e-3\nwarmup_steps = 9");
  read("tags = ['c']\noptim.lr = 2e-3");
  EXPECT_EQ(run.optim.lr, 2e-3);
  EXPECT_EQ(run.optim.warmup_steps, 9);
  EXPECT_EQ(run.tags, Words{"c"});
}

TEST_F(Options, WidenIntegersToNumbers) {
  read("optim.lr = 1");
  EXPECT_EQ(run.optim.lr, 1.0);
}

TEST_F(Options, ReadListsOfTables) {
  read("[[data.sources]]\npath = 'a.jsonl'\n[[data.sources]]\npath = 'b.jsonl'\nweight = 0.5");
  ASSERT_EQ(run.data.sources.size(), 2);
  EXPECT_EQ(run.data.sources[1].path, "b.jsonl");
  EXPECT_EQ(run.data.sources[1].weight, 0.5);
  type({"--data.sources.0.weight", "3", "--data.sources.2.path", "c.jsonl"});
  EXPECT_EQ(run.data.sources[0].weight, 3);
  ASSERT_EQ(run.data.sources.size(), 3);
  EXPECT_EQ(run.data.sources[2].path, "c.jsonl");
  type({"--data.sources", "[{path = 'd.jsonl'}]"});
  ASSERT_EQ(run.data.sources.size(), 1);
  EXPECT_EQ(run.data.sources[0].path, "d.jsonl");
}

TEST_F(Options, LetTheLaterFileAndThenTheCommandLineWin) {
  const TemporaryFolder folder;
  const auto first = (folder / "first.toml").string(), second = (folder / "second.toml").string();
  write_file(first, "seed = 1\noptim.lr = 1.0");
  write_file(second, "seed = 2");
  type({first, second});
  EXPECT_EQ(run.seed, 2);
  EXPECT_EQ(run.optim.lr, 1.0);
  type({first, second, "--seed", "3"});
  EXPECT_EQ(run.seed, 3);
}

TEST_F(OptionErrors, NameFileLineAndKey) {
  EXPECT_EQ(reading("seed = 1\n\n[optim]\nlr = 'fast'\n"), R"(run.toml:4: optim.lr: expected a number, got "fast")");
  EXPECT_EQ(reading("[optim]\nlr = \"1e-5x\""), R"(run.toml:2: optim.lr: expected a number, got "1e-5x")");
  EXPECT_EQ(reading("optim.lr = '1e-5'"),
            R"(run.toml:1: optim.lr: expected a number, got "1e-5"; write it without quotes)");
  EXPECT_EQ(reading("seed = 1.5"), "run.toml:1: seed: expected an integer, got 1.5");
  EXPECT_EQ(reading("seed = true"), "run.toml:1: seed: expected an integer, got true");
  EXPECT_EQ(reading("seed = 2026-01-01"), "run.toml:1: seed: expected an integer, got a date or time");
  EXPECT_EQ(reading("data.packing = 1"), "run.toml:1: data.packing: expected true or false, got 1");
  EXPECT_EQ(reading("tags = 'a'"), "run.toml:1: tags: expected a list of texts, got text");
  EXPECT_EQ(reading("tags = [[1]]"), "run.toml:1: tags: expected a list of texts, got a list");
  EXPECT_EQ(reading("optim.clip_norm = 'off'"), R"(run.toml:1: optim.clip_norm: expected a number or none, got "off")");
}

TEST_F(OptionErrors, NameTheOptionAsItWasTyped) {
  EXPECT_EQ(typing({"--optim.lr", "1e-5x"}), R"(--optim.lr: expected a number, got "1e-5x")");
  EXPECT_EQ(typing({"--optim.lr="}), R"(--optim.lr: expected a number, got "")");
  EXPECT_EQ(typing({"seed=1e3"}), R"(seed: expected an integer, got "1e3")");
  EXPECT_EQ(typing({"--seed", "99999999999999999999"}),
            "--seed: expected an integer, got 99999999999999999999, which does not fit into 64 bits");
  EXPECT_EQ(typing({"--optim.lr", "nan"}), "--optim.lr: expected a finite number, got nan");
  EXPECT_EQ(typing({"--seed", "none"}), R"(--seed: expected an integer, got "none")");
  EXPECT_EQ(typing({"--data.packing=yes"}), R"(--data.packing: expected true or false, got "yes")");
  EXPECT_EQ(typing({"--optim.betas", "0.9,,0.95"}), R"(--optim.betas: expected a list of numbers, got "")");
}

TEST_F(OptionErrors, StateTheAllowedRange) {
  EXPECT_EQ(reading("\noptim.lr = -1.5"), "run.toml:2: optim.lr: must be at least 0, got -1.5");
  EXPECT_EQ(typing({"--optim.betas", "0.9,1.5"}), "--optim.betas: must be between 0 and 1, got 1.5");
}

TEST_F(OptionErrors, ListTheChoices) {
  EXPECT_EQ(typing({"--optim.schedule", "cosin"}),
            R"(--optim.schedule: expected one of constant, cosine, linear; got "cosin"; did you mean cosine?)");
  EXPECT_EQ(reading("optim.schedule = 'wsd'"),
            R"(run.toml:1: optim.schedule: expected one of constant, cosine, linear; got "wsd")");
}

TEST_F(OptionErrors, SuggestTheNearestKey) {
  EXPECT_EQ(reading("seed = 1\n[optim]\nwarmup_step = 3"),
            R"(run.toml:3: unknown key "optim.warmup_step": did you mean optim.warmup_steps?)");
  EXPECT_EQ(reading("[optimizer]\nlr = 1"), R"(run.toml:1: unknown section "optimizer": did you mean optim?)");
  EXPECT_EQ(typing({"--train.lr", "1"}), R"(unknown option "--train.lr": did you mean optim.lr?)");
  EXPECT_EQ(typing({"--source.weight", "1"}),
            R"(unknown option "--source.weight": did you mean data.sources.N.weight?)");
  EXPECT_EQ(typing({"--modl.path", "1"}), R"(unknown option "--modl.path": did you mean model.path?)");
  EXPECT_THAT(typing({"--" + std::string(100'000, 'x'), "1"}), ::testing::EndsWith("x\"; --help lists all"));
  EXPECT_EQ(typing({"--sede", "1"}), R"(unknown option "--sede": did you mean seed?)");
  EXPECT_EQ(typing({"--zzz", "1"}), R"(unknown option "--zzz"; --help lists all)");
  EXPECT_EQ(reading("[[data.sources]]\npaht = 'a'"),
            R"(run.toml:2: unknown key "data.sources.0.paht": did you mean data.sources.0.path?)");
}

TEST_F(OptionErrors, KnowOtherProgramsNames) {
  EXPECT_EQ(reading("learning_rate = 1e-5"),
            R"(run.toml:1: unknown key "learning_rate": did you mean optim.lr (called learning_rate elsewhere)?)");
  EXPECT_EQ(typing({"--learning-rat", "1e-5"}),
            R"(unknown option "--learning-rat": did you mean optim.lr (called learning_rate elsewhere)?)");
  EXPECT_EQ(typing({"--optim.learning_rat", "1e-5"}),
            R"(unknown option "--optim.learning_rat": did you mean optim.lr (called learning_rate elsewhere)?)");
  EXPECT_EQ(typing({"--model-name-or-path", "x"}),
            R"(unknown option "--model-name-or-path": did you mean model.path (called model_name_or_path elsewhere)?)");
}

TEST_F(OptionErrors, SayWhatIsASectionAndWhatIsNot) {
  EXPECT_EQ(reading("model = 'x'"),
            "run.toml:1: model: expected a section, written [model], got text; write model.path = ...");
  EXPECT_EQ(reading("[seed]\nx = 1"), "run.toml:1: seed: expected an integer, got a section");
  EXPECT_EQ(
      reading("data.sources = ['a']"),
      "run.toml:1: data.sources: expected a list of tables, written [[data.sources]], got a list of something else");
  EXPECT_EQ(typing({"--data.sources.4.path", "x"}),
            "data.sources.4.path: data.sources has 0 entries; the next has the index 0");
}

TEST_F(OptionErrors, RefuseBrokenToml) {
  EXPECT_THAT(reading("seed = 1\noptim.lr = 1e-5x"), ::testing::StartsWith("run.toml:2: not valid TOML: "));
  EXPECT_THAT(reading("seed = 1\nseed = 2"), ::testing::StartsWith("run.toml:2: not valid TOML: "));
  EXPECT_EQ(reading("[optim]\nwarmup_steps = 1\nwarmup-steps = 2"), "run.toml:3: optim.warmup_steps: set twice");
  EXPECT_THAT(reading("seed = 1\n\uFE40"), ::testing::StartsWith("run.toml:2: not valid TOML: "));
  EXPECT_EQ(reading(std::string(100'000, '[')), "run.toml: not valid TOML");
  EXPECT_THAT(reading("seed = " + std::string(100'000, '[')), ::testing::HasSubstr("not valid TOML"));
}

TEST_F(OptionErrors, AreAllThatADamagedFileLeadsTo) {
  std::mt19937 random(1);
  const std::string whole =
      "seed = 1_000\ntags = ['a', \"b\"]\n[optim]\nlr = 1e-5 # x\nbetas = [\n 0.9,\n 0.5]\n[[data.sources]]\npath = "
      "'p'\n";
  constexpr std::string_view kInserted = "[]{}\"'=.,#\n\\0a\xff";
  for (int i = 0; i < 20'000; ++i) {
    auto damaged = whole;
    for (auto edits = random() % 4 + 1; edits > 0; --edits) {
      const auto at = random() % damaged.size();
      if (random() % 2 == 0) {
        damaged.insert(at, 1, kInserted[random() % kInserted.size()]);
      } else {
        damaged.erase(at, random() % 3);
      }
    }
    reading(damaged);  // another exception, or a crash, would end the test
  }
}

TEST_F(OptionErrors, RefuseWhatIsNoArgument) {
  EXPECT_EQ(typing({"--optim.lr"}), "--optim.lr: needs a value: a number");
  EXPECT_EQ(typing({"--optim.lr", "--seed", "1"}), "--optim.lr: needs a value: a number");
  EXPECT_EQ(typing({"--no-data.packing=true"}), "--no-data.packing: takes no value");
  EXPECT_EQ(typing({"run.yaml"}), R"(unexpected argument "run.yaml": expected a .toml file, --key value or key=value)");
  EXPECT_EQ(typing({"missing.toml"}), "missing.toml: no such file");
  EXPECT_EQ(typing({"--seed", "1", "run.toml"}), "run.toml: a file behind --seed would override it; name files first");
}

TEST_F(OptionErrors, AskForWhatIsRequired) {
  EXPECT_EQ(usage_error([&] { check_required(list); }),
            "model.path: required; give --model PATH or set it in a run file");
  type({"--model", "x", "--data.sources.0.weight", "2"});
  EXPECT_EQ(usage_error([&] { check_required(list); }),
            "data.sources.0.path: required; give --data.sources.0.path PATH or set it in a run file");
}

TEST(CommonOptionsTest, AreForTheCommandLineAlone) {
  ExampleOptions run;
  CommonOptions common;
  OptionList list(run);
  common.describe(list);
  apply_command_line(list, Words{"--dry-run", "--quiet"});
  EXPECT_TRUE(common.dry_run && common.quiet);
  EXPECT_EQ(to_toml(list).find("dry_run"), std::string::npos);
  EXPECT_EQ(usage_error([&] { apply_toml(list, "dry_run = true", "run.toml"); }),
            "run.toml:1: dry_run: only for the command line, as --dry-run");
}

TEST_F(Options, AreSavedAsAFileThatAPersonCanRead) {
  type({"--model", "tiny", "--optim.clip_norm", "none", "--data.sources.0.path", "a.jsonl", "--tags", "x,y"});
  EXPECT_EQ(to_toml(list), R"(seed = 42
tags = ["x", "y"]

[model]
path = "tiny"

[optim]
lr = 1e-05
schedule = "cosine"
betas = [0.9, 0.95]
clip_norm = "none"
warmup_steps = 0

[data]
packing = true
template_name = "none"

[[data.sources]]
path = "a.jsonl"
weight = 1.0
)");
}

TEST_F(Options, ReadBackFromTheirSavedFileBitForBit) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    const auto bits = random() & ~(std::uint64_t{1} << 63);  // the smallest allowed lr is 0
    run.optim.lr = std::bit_cast<double>(bits);
    if (!std::isfinite(run.optim.lr)) continue;
    run.seed = static_cast<std::int64_t>(random());
    ExampleOptions again;
    const OptionList fresh(again);
    apply_toml(fresh, to_toml(list), "saved");
    ASSERT_EQ(std::bit_cast<std::uint64_t>(again.optim.lr), bits) << run.optim.lr;
    ASSERT_EQ(again.seed, run.seed);
  }
}

TEST_F(Options, ReadBackEveryKindOfValue) {
  std::string all_ascii;
  for (char c = 1; c != 127; ++c) all_ascii += c;
  run.tags = {all_ascii + "\x7f", "", "ünï", "none", "a\\nb\"\"\""};
  run.model.path = "with space/and \"quotes\"";
  run.optim.schedule = ExampleSchedule::kConstant;
  run.optim.betas = {};
  run.optim.clip_norm = std::nullopt;
  run.data.template_name = "qwen";
  run.data.sources = {{"a", 1e-300}, {"b", std::numeric_limits<double>::max()}};
  run.seed = std::numeric_limits<std::int64_t>::min();

  ExampleOptions again;
  again.data.sources.resize(5);
  const OptionList fresh(again);
  apply_toml(fresh, to_toml(list), "saved");
  EXPECT_EQ(again.tags, run.tags);
  EXPECT_EQ(again.model.path, run.model.path);
  EXPECT_EQ(again.optim.schedule, run.optim.schedule);
  EXPECT_EQ(again.optim.betas, run.optim.betas);
  EXPECT_EQ(again.optim.clip_norm, run.optim.clip_norm);
  EXPECT_EQ(again.data.template_name, run.data.template_name);
  EXPECT_EQ(again.seed, run.seed);
  ASSERT_EQ(again.data.sources.size(), 2);
  EXPECT_EQ(again.data.sources[1].weight, run.data.sources[1].weight);
  EXPECT_EQ(to_toml(fresh), to_toml(list));

  run.data.sources.clear();
  apply_toml(fresh, to_toml(list), "saved");
  EXPECT_TRUE(again.data.sources.empty());
}

TEST_F(Options, ShowWhatDiffersFromTheDefaultsAtTheHeadOfALog) {
  EXPECT_EQ(changed_settings(list), "");
  type({"--optim.lr", "2e-5", "--optim.clip_norm", "none", "--data.sources.0.path", "a"});
  EXPECT_EQ(changed_settings(list),
            "optim.lr             2e-05 (default 1e-05)\n"
            "optim.clip_norm      none (default 1)\n"
            "data.sources.0.path  a (default \"\")\n");
}

TEST_F(Options, ExplainThemselvesWithDefaultAndUnit) {
  const auto help = option_help(list, "");
  EXPECT_THAT(help, ::testing::HasSubstr("\noptim: optimizer\n"));
  EXPECT_THAT(help, ::testing::HasSubstr(
                        "  --optim.warmup_steps N      from 0 to the peak (in steps; at least 0; default 0)\n"));
  EXPECT_THAT(help,
              ::testing::HasSubstr("  --model.path PATH           Hugging Face folder (required; also --model)\n"));
  EXPECT_THAT(help, ::testing::HasSubstr("  --optim.schedule constant|cosine|linear\n"));
  EXPECT_THAT(help, ::testing::HasSubstr("--data.sources.N.weight"));
  EXPECT_THAT(option_help(list, "optim"), ::testing::Not(::testing::HasSubstr("--seed")));
}

TEST(Nearest, IsTheLikeliestOrNone) {
  EXPECT_EQ(nearest("sfft", {"rl", "sft"}), "sft");
  EXPECT_EQ(nearest("bench", {"rl", "sft"}), "");
}

}  // namespace
}  // namespace sluice
