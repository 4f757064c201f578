// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/training_checkpoint.h"

#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <random>
#include <thread>

#include "sluice/formats/test_files.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Every element of every tensor is the step, so that a mixture of two checkpoints shows.
TrainingState state_of(std::int64_t step, std::int64_t elements = 6) {
  const auto value = static_cast<double>(step);
  return {.step = step,
          .meta = {{"seed", 42}, {"position", step * 10}},
          .tensors = {{"parameters",
                       {whole_tensor("a", at::full({elements}, value, kFloat)),
                        whole_tensor("b", at::full({2, 3}, value, kFloat))}},
                      {"exp_avg", {whole_tensor("a", at::full({elements}, value, kFloat))}}}};
}

void expect_state(const TrainingState& state, std::int64_t step) {
  EXPECT_EQ(state.step, step);
  EXPECT_EQ(state.meta["position"], step * 10);
  ASSERT_EQ(state.tensors.size(), 2u);
  for (const auto& [kind, tensors] : state.tensors) {
    for (const auto& tensor : tensors)
      EXPECT_TRUE(assemble(tensor).eq(static_cast<double>(step)).all().item<bool>()) << kind << " " << tensor.name;
  }
}

void save_now(const fs::path& run, std::int64_t step, Retention retention = {}) {
  CheckpointWriter writer(run, retention);
  writer.save(state_of(step));
  writer.wait();
}

std::vector<std::string> names(const fs::path& run) {
  std::vector<std::string> all;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) all.push_back(entry.path().filename().string());
  std::ranges::sort(all);
  return all;
}

void edit_meta(const fs::path& checkpoint, const std::function<void(nlohmann::json&)>& edit) {
  auto meta = nlohmann::json::parse(read_file(checkpoint / "meta.json"));
  edit(meta);
  write_file(checkpoint / "meta.json", meta.dump());
}

TEST(TrainingCheckpoint, SavedAtOnceIsTheSameOnDisk) {
  const TemporaryFolder run;
  CheckpointWriter writer(run.path(), {});
  writer.save_now(state_of(4));
  expect_state(read_checkpoint(run / "checkpoints/step_4"), 4);
}

TEST(TrainingCheckpoint, ReadsBackWhatWasSaved) {
  const TemporaryFolder run;
  save_now(run.path(), 500);
  EXPECT_THAT(names(run.path()), ElementsAre("latest", "step_500"));
  EXPECT_EQ(fs::read_symlink(run / "checkpoints/latest"), "step_500");
  const auto state = read_checkpoint(run / "checkpoints/latest");
  expect_state(state, 500);
  EXPECT_EQ(state.tensors.at("parameters")[1].name, "b");
  EXPECT_EQ(assemble(state.tensors.at("parameters")[1]).sizes(), (at::IntArrayRef{2, 3}));
}

TEST(TrainingCheckpoint, IsOfTheInstantOfTheSave) {
  const TemporaryFolder run;
  CheckpointWriter writer(run.path(), {});
  const auto state = state_of(1, 1 << 20);
  writer.save(state);
  for (const auto& [kind, tensors] : state.tensors) {
    for (const auto& tensor : tensors) tensor.parts[0].values.fill_(-1);
  }
  writer.wait();
  expect_state(*read_latest(run.path()), 1);
}

TEST(TrainingCheckpoint, ARunWithoutOneStartsFresh) {
  const TemporaryFolder run;
  EXPECT_FALSE(read_latest(run.path()));
  EXPECT_FALSE(find_latest(run.path()));
}

TEST(TrainingCheckpoint, PicksTheNewestByNumber) {
  const TemporaryFolder run;
  for (const auto step : {9, 10, 100}) save_now(run.path(), step);
  fs::create_directory(run / "checkpoints/.partial-step_200-1");
  fs::create_directory(run / "checkpoints/step_0300");
  fs::create_directory(run / "checkpoints/step_x");
  EXPECT_EQ(find_latest(run.path())->filename(), "step_100");
  expect_state(*read_latest(run.path()), 100);
}

TEST(TrainingCheckpoint, DamageIsRefusedByNameAndAutoResumeGoesBack) {
  const TemporaryFolder run;
  save_now(run.path(), 1);
  save_now(run.path(), 2);
  const auto newest = run / "checkpoints/step_2";
  const auto damaged = newest / "exp_avg.safetensors";
  const auto whole = read_file(damaged);
  const auto check = [&](const std::string& what) {
    EXPECT_THAT(data_error([&] { read_checkpoint(newest); }), AllOf(HasSubstr(what), HasSubstr("damaged")));
    expect_state(*read_latest(run.path()), 1);
  };
  auto flipped = whole;
  flipped.back() ^= 1;
  write_file(damaged, flipped);
  check("step_2/exp_avg.safetensors: checksum");
  write_file(damaged, whole.substr(1));
  check("step_2/exp_avg.safetensors: ");
  fs::remove(damaged);
  check("step_2/exp_avg.safetensors: this file is missing");
  write_file(damaged, whole);
  expect_state(*read_latest(run.path()), 2);
  edit_meta(newest, [](auto& meta) { meta["files"][0]["name"] = "../step_1/exp_avg.safetensors"; });
  check("no file of a checkpoint");
  edit_meta(newest, [](auto& meta) { meta.erase("run"); });
  check("meta.json: step, run or files");
  write_file(newest / "meta.json", "{");
  check("not valid JSON");
  fs::remove(newest / "meta.json");
  check("meta.json");
  fs::remove(run / "checkpoints/step_1/meta.json");
  EXPECT_THAT(data_error([&] { read_latest(run.path()); }), HasSubstr("every checkpoint is damaged"));
}

TEST(TrainingCheckpoint, AnotherFormatVersionIsRefusedWithAdvice) {
  const TemporaryFolder run;
  save_now(run.path(), 1);
  save_now(run.path(), 2);
  const auto error = [&] {
    const auto explicitly = data_error([&] { read_checkpoint(run / "checkpoints/step_2"); });
    EXPECT_EQ(data_error([&] { read_latest(run.path()); }), explicitly) << "not passed over for an older one";
    return explicitly;
  };
  edit_meta(run / "checkpoints/step_2", [](auto& meta) { meta["format_version"] = kCheckpointVersion + 1; });
  EXPECT_THAT(error(), HasSubstr("Use the newer sluice"));
  edit_meta(run / "checkpoints/step_2", [](auto& meta) { meta["format_version"] = kCheckpointVersion - 1; });
  EXPECT_THAT(error(), AllOf(HasSubstr("older"), HasSubstr("Export it")));
  edit_meta(run / "checkpoints/step_2", [](auto& meta) { meta.erase("format_version"); });
  EXPECT_THAT(error(), AllOf(HasSubstr("no format_version"), HasSubstr("Export it")));
}

TEST(TrainingCheckpoint, KeepsTheLastAndTheMilestones) {
  const TemporaryFolder run;
  for (std::int64_t step = 10; step <= 60; step += 10) save_now(run.path(), step, {.keep_last = 2, .keep_every = 30});
  EXPECT_THAT(names(run.path()), ElementsAre("latest", "step_30", "step_50", "step_60"));
}

TEST(TrainingCheckpoint, PruningSparesWhatIsAheadOfAResumedRun) {
  const TemporaryFolder run;
  save_now(run.path(), 100);
  save_now(run.path(), 200);
  save_now(run.path(), 150, {.keep_last = 1});
  EXPECT_THAT(names(run.path()), ElementsAre("latest", "step_150", "step_200"));
}

TEST(TrainingCheckpoint, ReplacesTheSameStep) {
  const TemporaryFolder run;
  save_now(run.path(), 5);
  write_file(run / "checkpoints/step_5/meta.json", "damaged");
  save_now(run.path(), 5);
  expect_state(*read_latest(run.path()), 5);
  EXPECT_THAT(names(run.path()), ElementsAre("latest", "step_5"));
}

TEST(TrainingCheckpoint, RemovesWhatAKilledProcessLeft) {
  const TemporaryFolder run;
  fs::create_directories(run / "checkpoints/.partial-step_7-123");
  const CheckpointWriter writer(run.path(), {});
  EXPECT_TRUE(names(run.path()).empty());
}

TEST(TrainingCheckpoint, AFailureInTheBackgroundSurfacesAtTheNextCall) {
  const TemporaryFolder run;
  CheckpointWriter writer(run.path(), {});
  fs::remove_all(run / "checkpoints");
  write_file(run / "checkpoints", "a file where the folder should be");
  writer.save(state_of(1));
  EXPECT_THROW(writer.save(state_of(2)), Error);
  fs::remove(run / "checkpoints");
  writer.save(state_of(3));  // and the next one works
  writer.wait();
  expect_state(*read_latest(run.path()), 3);
}

// The process that writes is killed at random instants. Whatever was complete before still opens, and whatever opens is
// whole.
TEST(TrainingCheckpoint, SurvivesBeingKilledAtAnyInstant) {
  const TemporaryFolder run;
  save_now(run.path(), 1);
  std::mt19937 random(1);
  std::int64_t last = 1;
  for (int attempt = 0; attempt < 40; ++attempt) {
    const auto child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      CheckpointWriter writer(run.path(), {.keep_last = 2});
      for (std::int64_t step = last + 1;; ++step) {
        writer.save(state_of(step, 20'000));
        writer.save(state_of(step, 20'000));  // replacing is no less safe
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution(0, 60'000)(random)));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto state = read_checkpoint(*find_latest(run.path()));
    expect_state(state, state.step);
    ASSERT_GE(state.step, last);
    last = state.step;
  }
  EXPECT_GT(last, 1) << "no checkpoint was written between two kills";
}

TEST(TrainingCheckpoint, AFullDiskIsOneErrorAndLeavesTheOldState) {
  const TemporaryFolder run;
  if (::mount("tmpfs", run.path().c_str(), "tmpfs", 0, "size=1m") != 0)
    GTEST_SKIP() << "cannot mount a small file system here";
  {
    CheckpointWriter writer(run.path(), {});
    writer.save(state_of(1));
    writer.wait();
    writer.save(state_of(2, 1 << 20));
    try {
      writer.wait();
      ADD_FAILURE() << "2 MB fitted into 1 MB";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kRuntime);
      EXPECT_THAT(error.what(), HasSubstr("No space left on device; free space there"));
    }
    EXPECT_THAT(names(run.path()), ElementsAre("latest", "step_1"));
    expect_state(*read_latest(run.path()), 1);
    writer.save(state_of(3));
    writer.wait();
    expect_state(*read_latest(run.path()), 3);
  }
  ::umount2(run.path().c_str(), MNT_DETACH);
}

}  // namespace
}  // namespace sluice
