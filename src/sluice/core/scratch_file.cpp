// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/scratch_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "sluice/core/error.h"
#include "sluice/core/files.h"

namespace sluice {
namespace {

// Whole pages around the part. Neither hint changes what the memory holds.
void advise(std::span<const std::byte> part, int advice) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  if (part.empty()) return;
  const auto before = reinterpret_cast<std::uintptr_t>(part.data()) % page;
  ::madvise(const_cast<std::byte*>(part.data()) - before, before + part.size(), advice);
}

}  // namespace

ScratchFile::ScratchFile(const std::filesystem::path& folder, std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  auto name = (folder / fmt::format("{}scratch-XXXXXX", kPartialPrefix)).string();
  const int descriptor = ::mkostemp(name.data(), O_CLOEXEC);
  if (descriptor < 0) fail(ExitCode::kRuntime, "{}: cannot create a file: {}", folder.string(), std::strerror(errno));
  ::unlink(name.c_str());
  auto error = ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  if (error == 0) {
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) error = errno;
    else data_ = static_cast<std::byte*>(mapped);
  }
  ::close(descriptor);
  if (error != 0) {
    fail(ExitCode::kRuntime, "{}: cannot make a file of {:.3f} GiB there: {}", folder.string(),
         static_cast<double>(bytes) / (1 << 30), std::strerror(error));
  }
}

ScratchFile::~ScratchFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

void ScratchFile::expect(std::span<const std::byte> part) { advise(part, MADV_WILLNEED); }

void ScratchFile::release(std::span<const std::byte> part) { advise(part, MADV_DONTNEED); }

}  // namespace sluice
