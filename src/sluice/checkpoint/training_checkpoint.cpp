// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/training_checkpoint.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <memory>

#include "sluice/checkpoint/tensor_io.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/formats/json.h"
#include "sluice/formats/safetensors.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kMetaFile = "meta.json";
constexpr std::string_view kStepPrefix = "step_";
constexpr std::string_view kLatestLink = "latest";
constexpr std::string_view kExtension = ".safetensors";
constexpr std::uint64_t kMaxMetaBytes = 64'000'000;

fs::path checkpoints_of(const fs::path& run) { return run / "checkpoints"; }

std::string folder_name(std::int64_t step) { return fmt::format("{}{}", kStepPrefix, step); }

// The N of "step_N"; nothing for any other name.
std::optional<std::int64_t> step_of(const fs::path& path) {
  const auto name = path.filename().string();
  std::int64_t step = 0;
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const auto [end, error] = std::from_chars(name.data() + kStepPrefix.size(), name.data() + name.size(), step);
  return error == std::errc() && folder_name(step) == name ? std::optional(step) : std::nullopt;
}

bool is_kind(std::string_view kind) {
  return !kind.empty() && kind.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string_view::npos;
}

// Renamed first, so that what is half removed has no checkpoint's name.
void remove_checkpoint(const fs::path& path) {
  const auto doomed = path.parent_path() / fmt::format("{}removed-{}", kPartialPrefix, path.filename().string());
  std::error_code error;
  fs::remove_all(doomed, error);
  fs::rename(path, doomed, error);
  if (!error) fs::remove_all(doomed, error);
  if (error) log_warning("{}: cannot remove this old checkpoint: {}", path.string(), error.message());
}

// Checkpoints after `step` belong to a run that went on from here before; they are not ours to judge.
void prune(const fs::path& run, std::int64_t step, const Retention& retention) {
  if (retention.keep_last == 0) return;
  std::int64_t newer = 0;
  for (const auto& path : list_checkpoints(run)) {
    const auto its_step = *step_of(path);
    if (its_step > step) continue;
    const bool milestone = retention.keep_every > 0 && its_step % retention.keep_every == 0;
    if (newer++ >= retention.keep_last && !milestone) remove_checkpoint(path);
  }
}

void point_latest(const fs::path& folder, const std::string& name) {
  const auto temporary = folder / fmt::format("{}{}-{}", kPartialPrefix, kLatestLink, ::getpid());
  std::error_code error;
  fs::remove(temporary, error);
  fs::create_directory_symlink(name, temporary, error);
  if (!error) fs::rename(temporary, folder / kLatestLink, error);
  // Some file systems have no symbolic links; nothing of ours reads this one.
  if (error) log_once("{}: cannot point it to {}: {}", (folder / kLatestLink).string(), name, error.message());
}

struct FileContent {
  std::uint64_t bytes;
  std::string xxh3;  // as checksum() gives it
};

// Piece by piece: a file of many GiB that is mapped counts as memory of this process.
FileContent read_whole(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> piece(1 << 20);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  FileContent content{};
  while (file) {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    const auto count = static_cast<std::size_t>(file.gcount());
    XXH3_64bits_update(&state, piece.data(), count);
    content.bytes += count;
  }
  SLUICE_CHECK(file.eof(), "{}: cannot be read", path.string());
  content.xxh3 = fmt::format("{:016x}", XXH3_64bits_digest(&state));
  return content;
}

void write_checkpoint(const fs::path& run, const TrainingState& state, const Retention& retention) {
  const auto name = folder_name(state.step);
  AtomicFolder folder(checkpoints_of(run) / name, AtomicFolder::Existing::kReplace);
  json files = json::array();
  for (const auto& [kind, tensors] : state.tensors) {
    const auto path = folder.path() / (kind + std::string(kExtension));
    std::vector<TensorInfo> infos;
    for (const auto& [tensor_name, tensor] : tensors) infos.push_back(tensor_info(tensor_name, tensor));
    SafetensorsWriter writer(path, infos);
    for (const auto& [tensor_name, tensor] : tensors) writer.write(tensor_bytes(tensor));
    writer.commit();
    const auto written = read_whole(path);
    files.push_back({{"name", path.filename().string()}, {"bytes", written.bytes}, {"xxh3", written.xxh3}});
  }
  const json meta = {
      {"format_version", kCheckpointVersion}, {"step", state.step}, {"files", files}, {"run", state.meta}};
  write_file(folder.path() / kMetaFile, meta.dump(2) + "\n");
  folder.commit();
  point_latest(checkpoints_of(run), name);
  prune(run, state.step, retention);
}

// The state as it is written: on the CPU, contiguous, each kind with its widest dtypes first so that all are aligned.
// `copied`: training cannot change it; otherwise it shares memory with the state where it can.
TrainingState snapshot(const TrainingState& state, bool copied) {
  const at::NoGradGuard no_grad;
  TrainingState copy{.step = state.step, .meta = state.meta, .tensors = {}};
  for (const auto& [kind, tensors] : state.tensors) {
    SLUICE_CHECK(is_kind(kind), "checkpoint: \"{}\" is no name for a kind of tensors; use a-z, 0-9 and _", kind);
    auto& copies = copy.tensors[kind];
    for (const auto& [name, tensor] : tensors) {
      copies.emplace_back(name, copied ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)).copy_(tensor)
                                       : tensor.detach().to(at::kCPU).contiguous());
    }
    std::ranges::stable_sort(copies, std::greater<>(), [](const auto& named) { return named.second.element_size(); });
  }
  return copy;
}

// A checkpoint that is not as it was written, as opposed to one that this version does not read.
class DamagedCheckpoint : public Error {
 public:
  explicit DamagedCheckpoint(const std::string& what)
      : Error(ExitCode::kData, what + ". The checkpoint is damaged; resume from another one.") {}
};

template <typename... Args>
[[noreturn]] void fail_damaged(const fs::path& file, fmt::format_string<Args...> format, Args&&... args) {
  throw DamagedCheckpoint(file.string() + ": " + fmt::format(format, std::forward<Args>(args)...));
}

void check_version(const json& meta, const fs::path& path) {
  constexpr std::string_view kAdvice =
      "Export it to a model folder with the version of sluice that wrote it, and start from that folder.";
  const auto version = meta.find("format_version");
  if (version == meta.end() || !version->is_number_integer()) {
    fail_data("{}: no format_version, so it is unknown how to read it. {}", path.string(), kAdvice);
  }
  if (*version > kCheckpointVersion) {
    fail_data("{}: format version {}, newer than the {} that this sluice reads. Use the newer sluice that wrote it.",
              path.string(), version->dump(), kCheckpointVersion);
  }
  if (*version < kCheckpointVersion) {
    fail_data("{}: format version {}, older than the {} that this sluice reads. {}", path.string(), version->dump(),
              kCheckpointVersion, kAdvice);
  }
}

// meta.json of a version that we read, with every entry that we use.
json read_meta(const fs::path& checkpoint) {
  const auto path = checkpoint / kMetaFile;
  json meta;
  try {
    meta = read_json_object(path, kMaxMetaBytes);
  } catch (const Error& error) {
    throw DamagedCheckpoint(error.what());
  }
  check_version(meta, path);
  const auto has = [](const json& object, const char* key, auto is_type) {
    return object.is_object() && object.contains(key) && (object[key].*is_type)();
  };
  if (!has(meta, "step", &json::is_number_integer) || !has(meta, "run", &json::is_object) ||
      !has(meta, "files", &json::is_array)) {
    fail_damaged(path, "step, run or files is missing");
  }
  for (const auto& file : meta["files"]) {
    if (!has(file, "name", &json::is_string) || !has(file, "bytes", &json::is_number_unsigned) ||
        !has(file, "xxh3", &json::is_string)) {
      fail_damaged(path, "files must be a list of name, bytes and xxh3");
    }
    const fs::path name = file["name"].get<std::string>();
    if (name.has_parent_path() || name.extension() != kExtension || !is_kind(name.stem().string())) {
      fail_damaged(path, "{} is no file of a checkpoint", printable(name.string()));
    }
  }
  return meta;
}

void check_files(const fs::path& checkpoint, const json& meta) {
  for (const auto& file : meta["files"]) {
    const auto path = checkpoint / file["name"].get<std::string>();
    if (!fs::exists(path)) fail_damaged(path, "this file is missing");
    const auto found = read_whole(path);
    if (found.bytes != file["bytes"]) {
      fail_damaged(path, "{} bytes, but {} were written", found.bytes, file["bytes"].dump());
    }
    const auto written = file["xxh3"].get<std::string>();
    if (found.xxh3 != written) {
      fail_damaged(path, "checksum {}, but {} was written", found.xxh3, printable(written));
    }
  }
}

TrainingState read_files(const fs::path& checkpoint, const json& meta) {
  TrainingState state{.step = meta["step"].get<std::int64_t>(), .meta = meta["run"], .tensors = {}};
  for (const auto& entry : meta["files"]) {
    const fs::path name = entry["name"].get<std::string>();
    const auto file = std::make_shared<const SafetensorsFile>(checkpoint / name);
    auto& tensors = state.tensors[name.stem().string()];
    for (const auto& stored : file->tensors()) tensors.emplace_back(stored.info.name, tensor_over(file, stored));
  }
  return state;
}

}  // namespace

CheckpointWriter::CheckpointWriter(const fs::path& run, Retention retention) : run_(run), retention_(retention) {
  const auto folder = checkpoints_of(run_);
  fs::create_directories(folder);
  std::vector<fs::path> left_behind;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with(kPartialPrefix)) left_behind.push_back(entry.path());
  }
  for (const auto& path : left_behind) {
    log_info("{}: half written by a process that was stopped; removed", path.string());
    fs::remove_all(path);
  }
}

CheckpointWriter::~CheckpointWriter() {
  try {
    wait();
  } catch (const std::exception& error) {
    log_warning("the last checkpoint was not saved: {}", error.what());
  }
}

void CheckpointWriter::save(const TrainingState& state) {
  wait();  // one copy of the state in memory at a time
  writing_ = std::async(std::launch::async, [run = run_, copy = snapshot(state, /*copied=*/true),
                                             retention = retention_] { write_checkpoint(run, copy, retention); });
}

void CheckpointWriter::save_now(const TrainingState& state) {
  wait();
  write_checkpoint(run_, snapshot(state, /*copied=*/false), retention_);
}

void CheckpointWriter::wait() {
  if (writing_.valid()) writing_.get();
}

std::vector<fs::path> list_checkpoints(const fs::path& run) {
  std::vector<fs::path> found;
  if (!fs::is_directory(checkpoints_of(run))) return found;
  for (const auto& entry : fs::directory_iterator(checkpoints_of(run))) {
    if (step_of(entry.path()) && entry.is_directory()) found.push_back(entry.path());
  }
  std::ranges::sort(found, std::greater<>(), [](const fs::path& path) { return *step_of(path); });
  return found;
}

std::optional<fs::path> find_latest(const fs::path& run) {
  const auto all = list_checkpoints(run);
  return all.empty() ? std::nullopt : std::optional(all.front());
}

TrainingState read_checkpoint(const fs::path& checkpoint) {
  if (!fs::is_directory(checkpoint)) fail_data("{}: no such checkpoint", checkpoint.string());
  const auto meta = read_meta(checkpoint);
  check_files(checkpoint, meta);
  return read_files(checkpoint, meta);
}

std::optional<TrainingState> read_latest(const fs::path& run) {
  const auto all = list_checkpoints(run);
  for (const auto& checkpoint : all) {
    try {
      return read_checkpoint(checkpoint);
    } catch (const DamagedCheckpoint& damaged) {
      log_warning("{} Trying the one before it.", damaged.what());
    }
  }
  if (!all.empty()) fail_data("{}: every checkpoint is damaged; start a new run", checkpoints_of(run).string());
  return std::nullopt;
}

}  // namespace sluice
