// SPDX-License-Identifier: Apache-2.0
// The hash from n-grams of token ids to rows of an embedding table (Qwen3.8-Flash-Next). For each order q = 2 .. N and
// each of its heads h, with s_0 the token, s_1 the one before it, ..:
//   row = offset_h + (s_0 m_0 xor s_1 m_1 xor .. xor s_{q-1} m_{q-1}) mod prime_h
// The multipliers m are odd, drawn by splitmix64 (Steele, Lea, Flood 2014) so that products stay below 2^63; each head
// has a prime of its own. Constants must be the published ones to the bit, or the table's rows mean nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice {

struct NgramHashSizes {
  std::int64_t vocab_size;
  std::int64_t ngram_size;       // N, the largest order, >= 2
  std::int64_t heads_per_ngram;  // of each order
  std::int64_t vocab_size_base;  // no prime is smaller
  std::int64_t divisible_by;     // of the table's rows
  std::int64_t seed;
  std::int64_t index;  // of this table among the model's, from 0
  std::int64_t eos_token_id;
};

class NgramHash {
 public:
  explicit NgramHash(const NgramHashSizes& sizes);

  std::int64_t heads() const { return static_cast<std::int64_t>(primes_.size()); }
  std::int64_t context() const { return sizes_.ngram_size - 1; }  // tokens before a token that count
  std::int64_t table_rows() const { return table_rows_; }
  const std::vector<std::int64_t>& multipliers() const { return multipliers_; }  // [N]
  const std::vector<std::int64_t>& primes() const { return primes_; }            // [heads], by order, then head
  const std::vector<std::int64_t>& offsets() const { return offsets_; }          // [heads]
  std::int64_t eos_token_id() const { return sizes_.eos_token_id; }

  // Rows of the last token of `tokens`, [heads]. An end-of-sequence token closes what stands before it, for the tokens
  // after it alone; what is closed, or lies before the first of `tokens`, counts as end of sequence.
  void rows(std::span<const std::int64_t> tokens, std::span<std::int64_t> rows) const;

 private:
  NgramHashSizes sizes_;
  std::vector<std::int64_t> multipliers_, primes_, offsets_;
  std::int64_t table_rows_;
};

}  // namespace sluice
