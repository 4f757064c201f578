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
#include "sluice/formats/model_folder.h"
#include "sluice/formats/safetensors.h"
#include "sluice/parallel/world.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kStepPrefix = "step_";
constexpr std::string_view kLatestLink = "latest";
constexpr std::string_view kExtension = ".safetensors";
constexpr std::uint64_t kMaxMetaBytes = 64'000'000;

fs::path checkpoints_of(const fs::path& run) { return run / kCheckpointsFolder; }

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

// "exp_avg.safetensors" of one process, "exp_avg-00001-of-00004.safetensors" of rank 1 of 4.
std::string file_name(const std::string& kind, const World* processes) {
  if (processes == nullptr) return kind + std::string(kExtension);
  return fmt::format("{}-{:05}-of-{:05}{}", kind, processes->rank(), processes->size(), kExtension);
}

// The kind of tensors that a file of this name holds; none: it is no file of a checkpoint.
std::optional<std::string> kind_of(const fs::path& name) {
  if (name.has_parent_path() || name.extension() != kExtension) return std::nullopt;
  auto kind = name.stem().string();
  if (const auto rank = kind.find('-'); rank != std::string::npos) {
    if (kind.find_first_not_of("0123456789-of", rank) != std::string::npos) return std::nullopt;
    kind.resize(rank);
  }
  return is_kind(kind) ? std::optional(kind) : std::nullopt;
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

TensorInfo part_info(const TensorParts& tensor, const TensorPart& part) {
  auto name = part_name(tensor, part);
  const bool whole = name == tensor.name;
  return {std::move(name), stored_dtype(part.values.scalar_type()), whole ? tensor.shape : part.values.sizes().vec()};
}

// Writes the state's tensors into the folder. What meta.json says of the files.
json write_files(const fs::path& folder, const TrainingState& state, const World* processes) {
  json files = json::array();
  for (const auto& [kind, tensors] : state.tensors) {
    const auto path = folder / file_name(kind, processes);
    std::vector<TensorInfo> infos;
    for (const auto& tensor : tensors) {
      for (const auto& part : tensor.parts) infos.push_back(part_info(tensor, part));
    }
    SafetensorsWriter writer(path, infos);
    for (const auto& tensor : tensors) {
      for (const auto& part : tensor.parts) writer.write(tensor_bytes(part.values));
    }
    writer.commit();
    const auto written = read_whole(path);
    files.push_back({{"name", path.filename().string()}, {"bytes", written.bytes}, {"xxh3", written.xxh3}});
  }
  return files;
}

// How the ranks tell each other of one save. They do so beside all exchanges of tensors, since training goes on.
class SaveTalk {
 public:
  SaveTalk(const World& processes, std::int64_t number) : processes_(processes), save_(number) {}

  void tell(const std::string& what, const std::string& text) const { processes_.post(name(what), text); }
  void tell_failure(const std::string& why) const { tell(kFailed, fmt::format("rank {}: {}", processes_.rank(), why)); }
  // Waits. An error if a rank could not save.
  std::string hear(const std::string& what) const {
    auto text = processes_.await({name(kFailed), name(what)});
    if (processes_.store()->check({name(kFailed)})) {
      fail(ExitCode::kRuntime, "no checkpoint was saved: {}", processes_.await({name(kFailed)}));
    }
    return text;
  }

 private:
  static constexpr auto kFailed = "failure";
  std::string name(const std::string& what) const { return fmt::format("checkpoint {} {}", save_, what); }
  const World& processes_;
  std::int64_t save_;
};

std::string part_of(std::int64_t rank) { return fmt::format("part of rank {}", rank); }

// The state as it is written: on the CPU, contiguous, each kind with its widest dtypes first so that all are aligned.
// `copied`: training cannot change it; otherwise it shares memory with the state where it can.
TrainingState snapshot(const TrainingState& state, bool copied) {
  const at::NoGradGuard no_grad;
  TrainingState copy{.step = state.step, .meta = state.meta, .tensors = {}};
  for (const auto& [kind, tensors] : state.tensors) {
    SLUICE_CHECK(is_kind(kind), "checkpoint: \"{}\" is no name for a kind of tensors; use a-z, 0-9 and _", kind);
    auto& copies = copy.tensors[kind];
    for (const auto& tensor : tensors) {
      auto& own = copies.emplace_back(TensorParts{.name = tensor.name, .shape = tensor.shape, .parts = {}});
      for (const auto& [box, values] : tensor.parts) {
        own.parts.push_back({box, copied ? at::empty(values.sizes(), values.options().device(at::kCPU)).copy_(values)
                                         : values.detach().to(at::kCPU).contiguous()});
      }
    }
    std::ranges::stable_sort(copies, std::greater<>(), [](const TensorParts& tensor) {
      return tensor.parts.empty() ? 0 : tensor.parts[0].values.element_size();
    });
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
    if (!kind_of(name)) {
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

// Adds a file's parts to the tensors that they are of.
void add_file(const fs::path& path, std::vector<TensorParts>& tensors, std::map<std::string, std::size_t>& places) {
  const auto file = std::make_shared<const SafetensorsFile>(path);
  for (const auto& stored : file->tensors()) {
    const auto part = parse_part_name(stored.info.name, stored.info.shape);
    if (!part) fail_damaged(path, "{} is no name of a tensor", printable(stored.info.name));
    const auto [place, is_new] = places.emplace(part->tensor, tensors.size());
    if (is_new) tensors.push_back({.name = part->tensor, .shape = part->shape, .parts = {}});
    auto& tensor = tensors[place->second];
    if (tensor.shape != part->shape) {
      fail_damaged(path, "{} is of another tensor than {} {}", printable(stored.info.name), printable(tensor.name),
                   shape_text(tensor.shape));
    }
    tensor.parts.push_back({.box = part->box, .values = rows_view(tensor_over(file, stored))});
  }
}

TrainingState read_files(const fs::path& checkpoint, const json& meta) {
  TrainingState state{.step = meta["step"].get<std::int64_t>(), .meta = meta["run"], .tensors = {}};
  std::map<std::string, std::map<std::string, std::size_t>> places;  // of the tensors of each kind
  for (const auto& entry : meta["files"]) {
    const auto name = entry["name"].get<std::string>();
    const auto kind = *kind_of(name);
    add_file(checkpoint / name, state.tensors[kind], places[kind]);
  }
  return state;
}

}  // namespace

CheckpointWriter::CheckpointWriter(const fs::path& run, Retention retention, const Mesh& mesh)
    : run_(run), retention_(retention), mesh_(mesh) {
  if (mesh.world().rank() != 0) return;
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

CheckpointWriter::Save CheckpointWriter::next_save() {
  return {.run = run_,
          .retention = retention_,
          .processes = mesh_.world().size() > 1 ? mesh_.processes() : nullptr,
          .number = saves_++};
}

void CheckpointWriter::save(const TrainingState& state) {
  wait();  // one copy of the state in memory at a time
  writing_ = std::async(std::launch::async,
                        [save = next_save(), copy = snapshot(state, /*copied=*/true)] { write(copy, save); });
}

void CheckpointWriter::save_now(const TrainingState& state) {
  wait();
  write(snapshot(state, /*copied=*/false), next_save());
}

void CheckpointWriter::write(const TrainingState& state, const Save& save) {
  const auto name = folder_name(state.step);
  const auto put_in_place = [&](AtomicFolder& folder, const json& files) {
    const json meta = {
        {"format_version", kCheckpointVersion}, {"step", state.step}, {"files", files}, {"run", state.meta}};
    write_file(folder.path() / kMetaFile, meta.dump(2) + "\n");
    folder.commit();
    point_latest(checkpoints_of(save.run), name);
    prune(save.run, state.step, save.retention);
  };
  const auto target = checkpoints_of(save.run) / name;
  if (save.processes == nullptr) {
    AtomicFolder folder(target, AtomicFolder::Existing::kReplace);
    return put_in_place(folder, write_files(folder.path(), state, nullptr));
  }
  const auto& processes = *save.processes;
  const SaveTalk talk(processes, save.number);
  try {
    if (processes.rank() == 0) {
      AtomicFolder folder(target, AtomicFolder::Existing::kReplace);
      talk.tell("folder", folder.path().string());
      auto files = write_files(folder.path(), state, &processes);
      for (std::int64_t rank = 1; rank < processes.size(); ++rank) {
        for (const auto& file : json::parse(talk.hear(part_of(rank)))) files.push_back(file);
      }
      put_in_place(folder, files);
      talk.tell("end", "");
    } else {
      const fs::path folder = talk.hear("folder");
      talk.tell(part_of(processes.rank()), write_files(folder, state, &processes).dump());
      talk.hear("end");
    }
  } catch (const std::exception& error) {
    talk.tell_failure(error.what());
    throw;
  }
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

TrainingState read_checked_checkpoint(const fs::path& run, std::int64_t step) {
  const auto checkpoint = checkpoints_of(run) / folder_name(step);
  return read_files(checkpoint, read_meta(checkpoint));
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
