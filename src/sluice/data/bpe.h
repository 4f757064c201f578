// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) over bytes: a word begins as one token a byte; as long as
// two neighbours can merge, the pair that was learnt first does, the leftmost where several are the same.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sluice/data/tokenizer.h"

namespace sluice {

// What two neighbouring tokens become. A flat hash table: one probe a lookup most of the time.
class MergeTable {
 public:
  struct Merge {
    std::int32_t rank;  // position in the list of merges: lower merges first
    TokenId merged;
  };
  explicit MergeTable(std::size_t expected);
  bool add(TokenId left, TokenId right, Merge merge);  // false if the pair is there already
  const Merge* find(TokenId left, TokenId right) const;

 private:
  struct Slot {
    std::uint64_t pair = kEmpty;
    Merge merge{};
  };
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};  // ids are not negative, so no pair looks like this
  std::size_t slot_of(std::uint64_t pair) const;              // where the pair is or would be
  std::vector<Slot> slots_;
  std::size_t mask_;
};

// The tokens of words seen before. Safe for use by several threads at once; bounded in size.
class WordCache {
 public:
  WordCache();
  ~WordCache();
  bool append(std::string_view word, std::vector<TokenId>& ids) const;  // false if the word is not there
  void store(std::string_view word, const TokenId* begin, const TokenId* end) const;

 private:
  struct Shard;
  std::unique_ptr<Shard[]> shards_;
};

class BytePairEncoder {
 public:
  // byte_ids[b] is the token of the single byte b. Words in `whole` become their token without any merge
  // (`ignore_merges`).
  BytePairEncoder(const std::array<TokenId, 256>& byte_ids, MergeTable merges,
                  std::unordered_map<std::string, TokenId> whole);

  // Appends the tokens of one word, of fewer than 2^31 bytes. Time n log n in its length.
  void encode(std::string_view word, std::vector<TokenId>& ids) const;

 private:
  void merge(std::string_view word, std::vector<TokenId>& ids) const;
  std::array<TokenId, 256> byte_ids_;
  MergeTable merges_;
  std::unordered_map<std::string, TokenId> whole_;
  WordCache cache_;
};

}  // namespace sluice
