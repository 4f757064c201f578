// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <variant>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/formats/model_folder.h"
#include "sluice/parallel/collectives.h"

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

constexpr std::string_view kLockFile = ".lock";

bool holds_a_run(const fs::path& out) {
  if (!fs::exists(out)) return false;
  return std::any_of(fs::directory_iterator(out), fs::directory_iterator(),
                     [](const fs::directory_entry& entry) { return entry.path().filename() != kLockFile; });
}

std::string this_process() {
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("process {} on {}", ::getpid(), host.data());
}

// What the holder wrote into the lock file; it may be about to.
std::string holder(int descriptor) {
  std::array<char, 256> text{};
  const auto length = ::pread(descriptor, text.data(), text.size(), 0);
  return length > 0 ? std::string(text.data(), static_cast<std::size_t>(length)) : "its process is not known";
}

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

OpenRun open_alone(const RunOptions& run, const CheckpointOptions& ckpt, const RunIdentity& identity,
                   const std::string& resolved_toml) {
  const auto& out = run.out;
  fs::create_directories(out);
  OpenRun opened{.lock = std::make_unique<RunLock>(out), .state = {}};
  check_run_folder(run, ckpt);  // again: another run may have ended there since
  if (ckpt.resume == Resume::kAuto) {
    opened.state = read_latest(out);
    if (opened.state) check_same(out, ckpt.force, identity, *opened.state);
  } else if (run.overwrite) {
    // Only what a run writes is removed; a mistyped folder keeps everything else.
    constexpr std::array<std::string_view, 5> kParts = {kExportFolder, kCheckpointsFolder, "config.toml",
                                                        "metrics.jsonl", "rollouts"};
    for (const auto part : kParts) fs::remove_all(out / part);
  }
  remove_partial(out);
  write_file(out / "config.toml", resolved_toml);
  return opened;
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

RunLock::RunLock(const fs::path& out) {
  const auto path = out / kLockFile;
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail(ExitCode::kRuntime, "{}: cannot create: {}", path.string(), std::strerror(errno));
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) {
    const auto owner = this_process();
    // The name is for the next one's message alone: on a full disk the lock holds without it.
    if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, owner.data(), owner.size(), 0) < 0) {
      log_warning("{}: cannot write: {}", path.string(), std::strerror(errno));
    }
  } else if (errno == EWOULDBLOCK) {
    const auto owner = holder(descriptor_);
    ::close(descriptor_);
    fail_usage("{}: another run writes there ({}).\n  Wait for its end, stop it, or give this one another run.out.",
               out.string(), owner);
  } else {
    log_warning("{}: cannot lock: {}; see to it that no other run writes there", path.string(), std::strerror(errno));
  }
}

RunLock::~RunLock() { ::close(descriptor_); }

OpenRun open_run(const RunOptions& run, const CheckpointOptions& ckpt, const RunIdentity& identity,
                 const std::string& resolved_toml, const Mesh& mesh) {
  constexpr std::int64_t kNone = -1;
  const bool first = mesh.world().rank() == 0;
  auto opened = first ? open_alone(run, ckpt, identity, resolved_toml) : OpenRun{};
  const auto step = all_gather_numbers({opened.state ? opened.state->step : kNone}, mesh.world())[0][0];
  if (!first && step != kNone) opened.state = read_checked_checkpoint(run.out, step);
  return opened;
}

}  // namespace sluice
