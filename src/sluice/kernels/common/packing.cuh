// SPDX-License-Identifier: Apache-2.0
// Sequences of a pack on the device. Their boundaries (cu_seqlens, packing.h) lie there, unseen by the host.
#pragma once

#include <cstdint>
#include <cstdio>

namespace sluice {

struct PackView {
  const int32_t* cu_seqlens;  // [sequences + 1]
  int32_t sequences, tokens;
};

// A sequence's tokens.
struct Span {
  int first, last;
};
__device__ inline Span sequence_span(const PackView& pack, int sequence) {
  return {pack.cu_seqlens[sequence], pack.cu_seqlens[sequence + 1]};
}

// Wrong boundaries would send later accesses astray: stops the program with a message. One thread for each sequence
// calls it in a kernel that runs before those accesses.
__device__ inline void check_span(const char* op, const PackView& pack, int sequence) {
  const Span span = sequence_span(pack, sequence);
  const bool starts = sequence > 0 || span.first == 0;
  const bool ends = sequence + 1 < pack.sequences || span.last == pack.tokens;
  if (starts && ends && 0 <= span.first && span.first <= span.last && span.last <= pack.tokens) return;
  printf("%s: cu_seqlens must rise from 0 to the number of tokens, %d; sequence %d of %d has [%d, %d)\n", op,
         pack.tokens, sequence, pack.sequences, span.first, span.last);
  __trap();
}

// Walks token by token through a pack.
struct SequenceCursor {
  int sequence;
  Span span;

  // The sequence that holds `token`.
  __device__ SequenceCursor(const PackView& pack, int token) {
    int low = 0, high = pack.sequences;  // the last sequence that starts at or before the token, so not an empty one
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (pack.cu_seqlens[middle] <= token ? low : high) = middle;
    }
    sequence = low;
    span = sequence_span(pack, low);
  }
  // True when `token`, one after the last, begins a sequence.
  __device__ bool advance(const PackView& pack, int token) {
    if (token != span.last) return false;
    while (sequence + 1 < pack.sequences && span.last <= token) span = sequence_span(pack, ++sequence);
    return true;
  }
};

}  // namespace sluice
