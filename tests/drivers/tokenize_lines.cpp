// SPDX-License-Identifier: Apache-2.0
// Encodes or decodes many texts in one process, for test_tokenizer.py. Standard input: records, each after its length
// in bytes (32 bits, little-endian). Standard output: a line for each, with two fields between which a tab stands, or
// "error: ..." where the record was refused.
//   encode: a text becomes its ids, with special tokens as literal text and as control tokens
//   decode: ids of 32 bits become their text in hexadecimal, with special tokens and without
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <string_view>

#include "sluice/core/error.h"
#include "sluice/data/tokenizer.h"

namespace {

using sluice::SpecialTokens;
using sluice::TokenId;
using sluice::Tokenizer;
using Answer = std::string (*)(const Tokenizer&, const std::string& record);

std::string encode(const Tokenizer& tokenizer, const std::string& text) {
  return fmt::format("{}\t{}", fmt::join(tokenizer.encode(text, SpecialTokens::kLiteral), " "),
                     fmt::join(tokenizer.encode(text, SpecialTokens::kControl), " "));
}

std::string hexadecimal(const std::string& text) {
  std::string hex;
  for (const char byte : text) hex += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return hex;
}

std::string decode(const Tokenizer& tokenizer, const std::string& record) {
  std::vector<TokenId> ids(record.size() / sizeof(TokenId));
  std::memcpy(ids.data(), record.data(), ids.size() * sizeof(TokenId));
  return hexadecimal(tokenizer.decode(ids)) + "\t" + hexadecimal(tokenizer.decode(ids, true));
}

const std::map<std::string_view, Answer> kAnswers = {{"encode", encode}, {"decode", decode}};

void answer_all(const Tokenizer& tokenizer, Answer answer) {
  std::uint32_t size = 0;
  std::string record;
  while (std::cin.read(reinterpret_cast<char*>(&size), sizeof(size))) {
    record.resize(size);
    std::cin.read(record.data(), size);
    try {
      std::cout << answer(tokenizer, record) << "\n";
    } catch (const sluice::Error& error) {
      std::cout << "error: " << error.what() << "\n";
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 || !kAnswers.contains(argv[2])) {
    fmt::print(stderr, "usage: tokenize_lines MODEL_FOLDER encode|decode\n");
    return 2;
  }
  try {
    answer_all(Tokenizer::load(argv[1]), kAnswers.at(argv[2]));
    return 0;
  } catch (const sluice::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return static_cast<int>(error.code());
  }
}
