// SPDX-License-Identifier: Apache-2.0
// Any text is a file of training records, or a data error; any record is a sample, or a data error.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/data/sample.h"

namespace {

using namespace sluice;

const SampleMaker& maker() {
  static const SampleMaker instance(
      Tokenizer::load(std::filesystem::path(SLUICE_SOURCE_DIR) / "examples" / "tiny" / "tokenizer"),
      ChatTemplate::built_in(), {});
  return instance;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto file =
      std::filesystem::temp_directory_path() / ("sluice-fuzz-" + std::to_string(::getpid()) + ".jsonl");
  write_file(file, {reinterpret_cast<const char*>(data), size});
  try {
    read_records(file, [](const Record& record) {
      try {
        maker().make(record);
      } catch (const Error& error) {  // the next record has its turn all the same
        if (error.code() != ExitCode::kData) throw;
      }
    });
  } catch (const Error& error) {
    if (error.code() != ExitCode::kData) throw;
  }
  return 0;
}
