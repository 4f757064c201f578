// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/metrics_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cassert>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
namespace {

[[noreturn]] void fail_errno(const std::filesystem::path& path, std::string_view what) {
  fail(ExitCode::kRuntime, "{}: cannot {}: {}", path.string(), what, std::strerror(errno));
}

std::int64_t step_of(std::string_view line, const std::filesystem::path& path, std::int64_t line_number) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto step = object.is_object() ? object.find("step") : object.end();
  if (!object.is_object() || step == object.end() || !step->is_number_integer()) {
    fail_data("{}:{}: not a line of metrics (an object with a step); move the file away to start a new one",
              path.string(), line_number);
  }
  return step->get<std::int64_t>();
}

// Bytes of the whole lines whose step is at most `last_step`. Steps never fall within a file.
std::int64_t bytes_to_keep(const std::filesystem::path& path, std::int64_t last_step) {
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  std::size_t kept = 0;
  for (std::int64_t line_number = 1;; ++line_number) {
    const auto end = text.find('\n', kept);
    if (end == std::string_view::npos) break;  // the end of the file, or a line without its end
    if (step_of(text.substr(kept, end - kept), path, line_number) > last_step) break;
    kept = end + 1;
  }
  return static_cast<std::int64_t>(kept);
}

}  // namespace

MetricsFile::MetricsFile(std::filesystem::path path, std::int64_t last_step) : path_(std::move(path)) {
  if (std::filesystem::exists(path_)) size_ = bytes_to_keep(path_, last_step);
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail_errno(path_, "open");
  if (::ftruncate(descriptor_, size_) != 0) {
    ::close(descriptor_);
    fail_errno(path_, "cut off later steps");
  }
}

MetricsFile::~MetricsFile() { ::close(descriptor_); }

void MetricsFile::write(std::int64_t step, const nlohmann::ordered_json& values) {
  assert(values.is_object());
  nlohmann::ordered_json object{{"step", step}};
  object.update(values);
  const auto line = object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  ssize_t written = 0;
  do {
    written = ::write(descriptor_, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(line.size())) {
    size_ += written;
    return;
  }
  if (written >= 0) errno = ENOSPC;  // a short write to a regular file: the disk took no more
  const int cause = errno;
  if (::ftruncate(descriptor_, size_) != 0) fail_errno(path_, "take back half a line");
  errno = cause;
  fail_errno(path_, "write");
}

}  // namespace sluice
