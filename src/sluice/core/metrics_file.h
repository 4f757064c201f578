// SPDX-License-Identifier: Apache-2.0
// metrics.jsonl of a run: one JSON object a line, numbers unrounded, each line handed to the system before write()
// ends, so that it outlives the process.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>

namespace sluice {

class MetricsFile {
 public:
  // Opens or creates `path` to go on after `last_step` (0: a new run). Lines of later steps, and a last line that a
  // killed process left half written, are cut off, so that no step appears twice. Data error, with its number, for
  // another bad line.
  explicit MetricsFile(std::filesystem::path path, std::int64_t last_step = 0);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // Appends {"step": step, ...values}. `values` is an object. JSON has no NaN and no infinity: they become null.
  // An error (a full disk) leaves the lines before it whole.
  void write(std::int64_t step, const nlohmann::ordered_json& values);

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;  // bytes of whole lines
};

}  // namespace sluice
