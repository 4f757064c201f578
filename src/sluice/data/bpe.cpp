// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/bpe.h"

#include <xxhash.h>

#include <bit>
#include <mutex>
#include <queue>
#include <utility>

namespace sluice {
namespace {

// Longer words are rare and seldom come back.
constexpr std::size_t kMostCachedBytes = 128;
// 32 x 2,048 words of about 200 bytes with their bookkeeping: 13 MB at most.
constexpr std::size_t kShards = 32;
constexpr std::size_t kMostWordsOfShard = 2048;

std::uint64_t pair_key(TokenId left, TokenId right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

struct WordHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view word) const { return XXH3_64bits(word.data(), word.size()); }
};

}  // namespace

MergeTable::MergeTable(std::size_t expected)
    : slots_(std::bit_ceil(2 * expected + 1)), mask_(slots_.size() - 1) {}  // at most half full: short probes

std::size_t MergeTable::slot_of(std::uint64_t pair) const {
  std::uint64_t hash = pair * 0x9E3779B97F4A7C15u;  // Fibonacci hashing: the high bits are the mixed ones
  for (std::size_t slot = (hash ^ hash >> 32) & mask_;; slot = (slot + 1) & mask_) {
    if (slots_[slot].pair == pair || slots_[slot].pair == kEmpty) return slot;
  }
}

bool MergeTable::add(TokenId left, TokenId right, Merge merge) {
  const auto pair = pair_key(left, right);
  auto& slot = slots_[slot_of(pair)];
  if (slot.pair == pair) return false;
  slot = {pair, merge};
  return true;
}

const MergeTable::Merge* MergeTable::find(TokenId left, TokenId right) const {
  const auto& slot = slots_[slot_of(pair_key(left, right))];
  return slot.pair == kEmpty ? nullptr : &slot.merge;
}

struct WordCache::Shard {
  std::mutex mutex;
  std::unordered_map<std::string, std::vector<TokenId>, WordHash, std::equal_to<>> words;
};

WordCache::WordCache() : shards_(std::make_unique<Shard[]>(kShards)) {}
WordCache::~WordCache() = default;

bool WordCache::append(std::string_view word, std::vector<TokenId>& ids) const {
  if (word.size() > kMostCachedBytes) return false;
  auto& shard = shards_[WordHash{}(word) >> 32 & (kShards - 1)];
  const std::lock_guard lock(shard.mutex);
  const auto found = shard.words.find(word);
  if (found == shard.words.end()) return false;
  ids.insert(ids.end(), found->second.begin(), found->second.end());
  return true;
}

void WordCache::store(std::string_view word, const TokenId* begin, const TokenId* end) const {
  if (word.size() > kMostCachedBytes) return;
  auto& shard = shards_[WordHash{}(word) >> 32 & (kShards - 1)];
  const std::lock_guard lock(shard.mutex);
  if (shard.words.size() >= kMostWordsOfShard) shard.words.clear();  // common words are back at once
  shard.words.try_emplace(std::string(word), begin, end);
}

BytePairEncoder::BytePairEncoder(const std::array<TokenId, 256>& byte_ids, MergeTable merges,
                                 std::unordered_map<std::string, TokenId> whole)
    : byte_ids_(byte_ids), merges_(std::move(merges)), whole_(std::move(whole)) {}

void BytePairEncoder::encode(std::string_view word, std::vector<TokenId>& ids) const {
  if (word.size() == 1) {
    ids.push_back(byte_ids_[static_cast<std::uint8_t>(word.front())]);
    return;
  }
  if (cache_.append(word, ids)) return;
  const std::size_t begin = ids.size();
  if (const auto found = whole_.empty() ? whole_.end() : whole_.find(std::string(word)); found != whole_.end()) {
    ids.push_back(found->second);
  } else {
    merge(word, ids);
  }
  cache_.store(word, ids.data() + begin, ids.data() + ids.size());
}

// The symbols of the word are a linked list; every pair that can merge waits in a heap. A pair whose symbols have
// changed meanwhile is recognised when it comes out, and dropped.
void BytePairEncoder::merge(std::string_view word, std::vector<TokenId>& ids) const {
  constexpr TokenId kGone = -1;
  struct Symbol {
    TokenId id;
    std::int32_t previous, next;  // -1 and size at the ends
  };
  struct Pair {
    std::int32_t rank, left;
    bool operator>(const Pair& other) const { return std::pair(rank, left) > std::pair(other.rank, other.left); }
  };
  const auto size = static_cast<std::int32_t>(word.size());
  std::vector<Symbol> symbols(word.size());
  const auto at = [&](std::int32_t i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };
  for (std::int32_t i = 0; i < size; ++i) {
    at(i) = {byte_ids_[static_cast<std::uint8_t>(word[static_cast<std::size_t>(i)])], i - 1, i + 1};
  }

  const auto merge_at = [&](std::int32_t left) -> const MergeTable::Merge* {
    if (left < 0 || at(left).next == size) return nullptr;
    return merges_.find(at(left).id, at(at(left).next).id);
  };
  std::vector<Pair> waiting;
  waiting.reserve(word.size());
  for (std::int32_t i = 0; i < size; ++i) {
    if (const auto* merge = merge_at(i)) waiting.push_back({merge->rank, i});
  }
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> heap(std::greater<>{}, std::move(waiting));

  while (!heap.empty()) {
    const auto [rank, left] = heap.top();
    heap.pop();
    if (at(left).id == kGone) continue;
    const auto* merge = merge_at(left);
    if (merge == nullptr || merge->rank != rank) continue;
    auto& right = at(at(left).next);
    at(left).id = merge->merged;
    at(left).next = right.next;
    right.id = kGone;
    if (right.next < size) at(right.next).previous = left;
    for (const std::int32_t neighbour : {at(left).previous, left}) {
      if (const auto* next = merge_at(neighbour)) heap.push({next->rank, neighbour});
    }
  }
  for (std::int32_t i = 0; i < size; i = at(i).next) ids.push_back(at(i).id);
}

}  // namespace sluice
