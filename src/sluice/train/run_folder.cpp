// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/run_folder.h"

#include <algorithm>
#include <span>
#include <variant>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"

namespace sluice {
namespace fs = std::filesystem;
namespace {

nlohmann::json to_json(const Scalars& values) {
  auto list = nlohmann::json::array();
  for (const auto& value : values) std::visit([&](const auto& plain) { list.push_back(plain); }, value);
  return list;
}

// "optim.lr: 1e-05 before, 2e-05 now", one a line.
std::string differences(const nlohmann::json& before, const nlohmann::json& now) {
  std::string lines;
  for (const auto& [name, value] : now.items()) {
    const auto old = before.contains(name) ? before.at(name) : nlohmann::json();
    if (old != value) lines += fmt::format("\n  {}: {} before, {} now", name, old.dump(), value.dump());
  }
  return lines;
}

bool holds_a_run(const fs::path& out) { return fs::exists(out) && !fs::is_empty(out); }

// What a killed process left half written.
void remove_partial(const fs::path& out) {
  std::vector<fs::path> partial;
  for (const auto& entry : fs::directory_iterator(out)) {
    if (entry.path().filename().string().starts_with(kPartialPrefix)) partial.push_back(entry.path());
  }
  for (const auto& path : partial) fs::remove_all(path);
}

void check_same(const fs::path& out, bool force, const RunIdentity& identity, const TrainingState& state) {
  auto changed = differences(state.meta.value("settings", nlohmann::json::object()), identity.settings);
  if (changed.empty() && state.meta.value("samples", "") != identity.samples) {
    changed = fmt::format("\n  data.path: {} holds other samples than before",
                          identity.settings.at("data.path").at(0).get<std::string>());
  }
  if (changed.empty()) return;
  if (!force) {
    fail_usage("{}: the run began with other settings:{}\n  Give the same ones, or --ckpt.force to go on with these.",
               out.string(), changed);
  }
  log_warning("going on with other settings than the run began with:{}", changed);
}

}  // namespace

nlohmann::json maths_settings(const OptionList& list) {
  auto settings = nlohmann::json::object();
  for (const auto& option : list.options()) {
    const auto section = option.name.substr(0, option.name.find('.'));
    const bool decides =
        section != "run" && section != "ckpt" && section != "eval" && section != "mem" && section != "parallel";
    if (decides || option.name == "eval.split") settings[option.name] = to_json(option.get());
  }
  for (const auto& table : list.tables()) {
    for (std::size_t i = 0; i < table.size(); ++i) settings.update(maths_settings(table.entry(i)));
  }
  return settings;
}

void check_run_folder(const RunOptions& run, const CheckpointOptions& ckpt) {
  const bool resume = ckpt.resume == Resume::kAuto;
  if (run.overwrite && resume) {
    fail_usage("run.overwrite and ckpt.resume = auto contradict each other: give one of them");
  }
  if (!run.overwrite && !resume && holds_a_run(run.out)) {
    fail_usage("{}: not empty; --ckpt.resume auto goes on with the run there, --run.overwrite removes it",
               run.out.string());
  }
}

std::optional<TrainingState> open_run(const RunOptions& run, const CheckpointOptions& ckpt, const RunIdentity& identity,
                                      const std::string& resolved_toml) {
  const auto& out = run.out;
  std::optional<TrainingState> state;
  if (ckpt.resume == Resume::kAuto) {
    state = read_latest(out);
    if (state) check_same(out, ckpt.force, identity, *state);
  } else if (run.overwrite) {
    // Only what a run writes is removed; a mistyped folder keeps everything else.
    for (const auto* part : {"config.toml", "metrics.jsonl", "checkpoints", "rollouts", "export"})
      fs::remove_all(out / part);
  }
  fs::create_directories(out);
  remove_partial(out);
  write_file(out / "config.toml", resolved_toml);
  return state;
}

}  // namespace sluice
