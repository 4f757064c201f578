// SPDX-License-Identifier: Apache-2.0
// Any bytes are a tokenizer.json or a data error; one that loads takes any text back and forth, or refuses it.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/data/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sluice;
  static const auto folder = [] {
    auto path = std::filesystem::temp_directory_path() / ("sluice-fuzz-" + std::to_string(::getpid()));
    std::filesystem::create_directories(path);
    return path;
  }();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  write_file(folder / "tokenizer.json", text);
  try {
    const auto tokenizer = Tokenizer::load(folder);
    for (const auto special : {SpecialTokens::kLiteral, SpecialTokens::kControl}) {
      const auto ids = tokenizer.encode(text, special);
      for (const auto id : ids) {
        if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
      }
      tokenizer.decode(ids);
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::kData) throw;
  }
  return 0;
}
