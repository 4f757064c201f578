// SPDX-License-Identifier: Apache-2.0
// Work on a GPU that is recorded once and launched as a whole from then on (a CUDA graph): for work of many short
// kernels, whose launches take longer than they.
#pragma once

#include <functional>
#include <memory>

#include "sluice/core/tensor.h"

namespace sluice {

class RecordedWork {
 public:
  virtual ~RecordedWork() = default;

  // Does the work on the current stream. It reads and writes where it did when it was recorded: tensors made before
  // hold its input, and those that it made stay in place for as long as this lives.
  virtual void replay() = 0;
};

// Calls work() twice: once as it is, so that libraries are ready, then recording, when nothing is computed. The host
// must not wait for the device in it. `device` is a GPU. Work that leaves no tensor of its own behind may share its
// memory with such work `beside` it: they are replayed one after the other.
std::unique_ptr<RecordedWork> record_work(at::Device device, const std::function<void()>& work,
                                          RecordedWork* beside = nullptr);

}  // namespace sluice
