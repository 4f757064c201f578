// SPDX-License-Identifier: Apache-2.0
// Where a program's time on the GPU goes: CUDA loads this library into it (CUDA_INJECTION64_PATH), and at its end the
// kernels and copies are listed by the time they took together, in the file that KERNEL_TIMES names. With the headers
// and the library of CUPTI, which PyPI's torch brings along (CU = .venv/lib/python3.*/site-packages/nvidia/cu13):
//   g++ -std=c++20 -O2 -shared -fPIC -I$CU/include bench/kernel_times.cpp -o libkernel_times.so $CU/lib/libcupti.so.13
//   CUDA_INJECTION64_PATH=$PWD/libkernel_times.so KERNEL_TIMES=kernels.txt sluice sft ...
#include <cupti.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Entry {
  long count = 0;
  double ms = 0;
};
std::mutex mutex;
std::map<std::string, Entry> entries;
unsigned long long first = ~0ULL, last = 0;
double busy_ms = 0;

void add(const std::string& name, unsigned long long start, unsigned long long end) {
  auto& entry = entries[name];
  ++entry.count;
  entry.ms += static_cast<double>(end - start) / 1e6;
  busy_ms += static_cast<double>(end - start) / 1e6;
  first = std::min(first, start);
  last = std::max(last, end);
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* records) {
  *size = 8 << 20;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *size));
  *records = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  const std::lock_guard lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<CUpti_ActivityKernel9*>(record);
      add(kernel->name, kernel->start, kernel->end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<CUpti_ActivityMemcpy5*>(record);
      add("copy, kind " + std::to_string(copy->copyKind), copy->start, copy->end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* set = reinterpret_cast<CUpti_ActivityMemset4*>(record);
      add("memset", set->start, set->end);
    }
  }
  std::free(buffer);
}

void print() {
  cuptiActivityFlushAll(1);
  const std::lock_guard lock(mutex);
  std::vector<std::pair<std::string, Entry>> rows(entries.begin(), entries.end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
  std::FILE* file = std::fopen(std::getenv("KERNEL_TIMES") ? std::getenv("KERNEL_TIMES") : "kernel_times.txt", "w");
  std::fprintf(file, "span %.1f ms, busy %.1f ms\n", static_cast<double>(last - first) / 1e6, busy_ms);
  for (const auto& [name, entry] : rows) {
    std::fprintf(file, "%10.3f ms %7ld x %9.1f us  %s\n", entry.ms, entry.count,
                 1000 * entry.ms / static_cast<double>(entry.count), name.substr(0, 300).c_str());
  }
  std::fclose(file);
}

}  // namespace

extern "C" int InitializeInjection() {
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
  std::atexit(print);
  return 1;
}
