// SPDX-License-Identifier: Apache-2.0
// Launches of kernels whose threads own a vector of neighbours each: 16 bytes, where sizes and addresses allow it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "sluice/kernels/common/lanes.cuh"

namespace sluice {

// Whether rows of `width` elements T, which begin at these addresses and lie these strides (in elements) apart, can be
// read and written 16 bytes at a time.
template <typename T>
bool in_vectors(int64_t width, std::initializer_list<const void*> addresses,
                std::initializer_list<int64_t> strides = {}) {
  bool fits = width % kVector<T> == 0;
  for (const void* address : addresses) fits = fits && reinterpret_cast<uintptr_t>(address) % 16 == 0;
  for (const int64_t stride : strides) fits = fits && stride % kVector<T> == 0;
  return fits;
}

inline unsigned blocks_for(int64_t items, int items_a_block) {
  return static_cast<unsigned>((items + items_a_block - 1) / items_a_block);
}

// Calls launch.operator()<T, lanes>(): of bfloat16 or float, with as many lanes as in_vectors() allows, or one.
template <typename Launch>
cudaError_t launch_in_vectors(bool bfloat16, int64_t width, std::initializer_list<const void*> addresses,
                              std::initializer_list<int64_t> strides, const Launch& launch) {
  const auto with_type = [&]<typename T>() {
    if (in_vectors<T>(width, addresses, strides)) launch.template operator()<T, kVector<T>>();
    else launch.template operator()<T, 1>();
  };
  if (bfloat16) with_type.template operator()<__nv_bfloat16>();
  else with_type.template operator()<float>();
  return cudaGetLastError();
}

}  // namespace sluice
