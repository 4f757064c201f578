// SPDX-License-Identifier: Apache-2.0
// Where an optimizer's float32 states lie between steps. What a step works on is brought to the device part by part,
// and taken back, so that the device holds no more than a few parts of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "sluice/core/scratch_file.h"
#include "sluice/core/tensor.h"

namespace sluice {

enum class Offload {
  kOff,   // on the device
  kHost,  // in the host's memory, on a GPU page-locked
  kDisk,  // in a file without a name
};

struct OffloadSettings {
  Offload where = Offload::kOff;
  std::filesystem::path folder = {};      // of the file
  std::int64_t part_elements = 16 << 20;  // of each state that come to the device at once; one row at least
};

// Hands out the places of states, in the order in which a step asks for them.
class StatePlaces {
 public:
  // `elements` of all states together, of which there are `count`.
  StatePlaces(const OffloadSettings& settings, at::Device device, std::int64_t elements, std::int64_t count);

  // Zeros, [rows, columns] float32.
  Tensor next(std::int64_t rows, std::int64_t columns);

  // Hints for states that next() gave, or rows of them.
  void expect(const std::vector<Tensor>& states) const;
  void release(const std::vector<Tensor>& states) const;

 private:
  OffloadSettings settings_;
  at::Device device_;
  std::shared_ptr<ScratchFile> file_;  // of kDisk; the states keep it too
  std::size_t used_ = 0;               // bytes of it
};

}  // namespace sluice
