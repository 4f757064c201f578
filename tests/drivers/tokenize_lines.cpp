// SPDX-License-Identifier: Apache-2.0
// Encodes many texts in one process, for test_tokenizer.py. Standard input: texts, each after its length in bytes (32
// bits, little-endian). Standard output: for each text one line of ids, or "error: ..." where the text was refused.
//   tokenize_lines MODEL_FOLDER literal|control
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>

#include "sluice/core/error.h"
#include "sluice/data/tokenizer.h"

namespace {

using sluice::SpecialTokens;
using sluice::Tokenizer;

std::string answer(const Tokenizer& tokenizer, std::string_view text, SpecialTokens mode) {
  try {
    return fmt::format("{}\n", fmt::join(tokenizer.encode(text, mode), " "));
  } catch (const sluice::Error& error) {
    return fmt::format("error: {}\n", error.what());
  }
}

int run(std::string_view folder, std::string_view mode_name) {
  const auto tokenizer = Tokenizer::load(folder);
  const auto mode = mode_name == "control" ? SpecialTokens::kControl : SpecialTokens::kLiteral;
  std::uint32_t size = 0;
  std::string text;
  while (std::cin.read(reinterpret_cast<char*>(&size), sizeof(size))) {
    text.resize(size);
    std::cin.read(text.data(), size);
    std::cout << answer(tokenizer, text, mode);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print(stderr, "usage: tokenize_lines MODEL_FOLDER literal|control\n");
    return 2;
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const sluice::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return static_cast<int>(error.code());
  }
}
