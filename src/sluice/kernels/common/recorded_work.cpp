// SPDX-License-Identifier: Apache-2.0
#include "sluice/kernels/common/recorded_work.h"

#include <dlfcn.h>

#include "sluice/core/error.h"

namespace sluice {

std::unique_ptr<RecordedWork> record_work(at::Device device, const std::function<void()>& work, RecordedWork* beside) {
  using Record = RecordedWork* (*)(at::Device, const std::function<void()>&, RecordedWork*);
  const auto record = reinterpret_cast<Record>(::dlsym(RTLD_DEFAULT, "sluice_record_work"));
  SLUICE_CHECK(record != nullptr, "libsluice_cuda.so is not loaded, or is of another version.\n  Build it anew.");
  return std::unique_ptr<RecordedWork>(record(device, work, beside));
}

}  // namespace sluice
