// SPDX-License-Identifier: Apache-2.0
// Encodes or decodes many texts in one process, for test_tokenizer.py. Standard input: records, each after its length
// in bytes (32 bits, little-endian): a text, or ids of 32 bits. Standard output, a line for each: ids, or the decoded
// text in hexadecimal, or "error: ..." where the record was refused.
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

template <SpecialTokens kMode>
std::string encode(const Tokenizer& tokenizer, const std::string& text) {
  return fmt::format("{}", fmt::join(tokenizer.encode(text, kMode), " "));
}

template <bool kSkipSpecial>
std::string decode(const Tokenizer& tokenizer, const std::string& record) {
  std::vector<TokenId> ids(record.size() / sizeof(TokenId));
  std::memcpy(ids.data(), record.data(), ids.size() * sizeof(TokenId));
  std::string hex;
  for (const char byte : tokenizer.decode(ids, kSkipSpecial))
    hex += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return hex;
}

const std::map<std::string_view, Answer> kAnswers = {{"encode-literal", encode<SpecialTokens::kLiteral>},
                                                     {"encode-control", encode<SpecialTokens::kControl>},
                                                     {"decode", decode<false>},
                                                     {"decode-skip-special", decode<true>}};

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
    fmt::print(stderr, "usage: tokenize_lines MODEL_FOLDER encode-literal|encode-control|decode|decode-skip-special\n");
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
