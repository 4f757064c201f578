// SPDX-License-Identifier: Apache-2.0
// Marks a hot loop to be compiled for several levels of x86-64; the loader picks the best one that the machine has, so
// that one executable serves them all.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define SLUICE_MULTIARCH \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3", "fp-contract=fast")))
#else
#define SLUICE_MULTIARCH
#endif
