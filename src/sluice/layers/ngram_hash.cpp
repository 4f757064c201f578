// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/ngram_hash.h"

#include <algorithm>
#include <cassert>
#include <limits>

namespace sluice {
namespace {

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15;

std::uint64_t splitmix64(std::uint64_t x) {
  x += kGamma;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::vector<std::int64_t> draw_multipliers(const NgramHashSizes& s) {
  constexpr std::int64_t kSeedStep = 10007;  // from one table to the next
  const auto largest = std::numeric_limits<std::int64_t>::max() / std::max<std::int64_t>(s.vocab_size, 1);
  const auto half = static_cast<std::uint64_t>(std::max<std::int64_t>(1, largest / 2));
  const auto base = static_cast<std::uint64_t>(s.seed + kSeedStep * s.index);
  std::vector<std::int64_t> multipliers;
  for (std::int64_t i = 0; i < s.ngram_size; ++i) {
    const auto drawn = splitmix64(base + kGamma * static_cast<std::uint64_t>(i + 1));
    multipliers.push_back(static_cast<std::int64_t>(2 * (drawn % half) + 1));
  }
  return multipliers;
}

bool is_prime(std::int64_t n) {
  if (n < 2 || n % 2 == 0) return n == 2;
  for (std::int64_t d = 3; d * d <= n; d += 2) {
    if (n % d == 0) return false;
  }
  return true;
}

// `count` primes from the first one >= base on, after leaving out `skipped` of them.
std::vector<std::int64_t> primes_from(std::int64_t base, std::int64_t skipped, std::int64_t count) {
  std::vector<std::int64_t> primes;
  for (auto n = base; static_cast<std::int64_t>(primes.size()) < skipped + count; ++n) {
    if (is_prime(n)) primes.push_back(n);
  }
  primes.erase(primes.begin(), primes.begin() + skipped);
  return primes;
}

}  // namespace

NgramHash::NgramHash(const NgramHashSizes& s) : sizes_(s), multipliers_(draw_multipliers(s)) {
  const auto heads = (s.ngram_size - 1) * s.heads_per_ngram;
  primes_ = primes_from(s.vocab_size_base, s.index * heads, heads);
  std::int64_t total = 0;
  for (const auto prime : primes_) {
    offsets_.push_back(total);
    total += prime;
  }
  table_rows_ = (total + s.divisible_by - 1) / s.divisible_by * s.divisible_by;
}

void NgramHash::rows(std::span<const std::int64_t> tokens, std::span<std::int64_t> rows) const {
  assert(!tokens.empty() && static_cast<std::int64_t>(rows.size()) == heads());
  const auto product = [&](std::int64_t token, std::int64_t k) {
    return static_cast<std::uint64_t>(token) * static_cast<std::uint64_t>(multipliers_[k]);
  };
  auto mixed = product(tokens.back(), 0);
  bool closed = false;
  for (std::int64_t k = 1; k < sizes_.ngram_size; ++k) {
    const auto index = static_cast<std::int64_t>(tokens.size()) - 1 - k;
    closed = closed || index < 0 || tokens[index] == sizes_.eos_token_id;
    mixed ^= product(closed ? sizes_.eos_token_id : tokens[index], k);
    for (auto head = (k - 1) * sizes_.heads_per_ngram; head < k * sizes_.heads_per_ngram; ++head) {
      rows[head] = offsets_[head] + static_cast<std::int64_t>(mixed % static_cast<std::uint64_t>(primes_[head]));
    }
  }
}

}  // namespace sluice
