// SPDX-License-Identifier: Apache-2.0
// Row arithmetic on GPUs: neighbouring elements moved as one access, float arithmetic on them, the sigmoid.
#pragma once

#include <cuda_bf16.h>

#include <cstring>

namespace sluice {

// 16 or 8 bytes to global memory in one access; the compiler may write a struct of bfloat16 in several.
__device__ inline void store_vector(void* destination, uint4 vector) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(vector.x), "r"(vector.y),
               "r"(vector.z), "r"(vector.w)
               : "memory");
}
__device__ inline void store_vector(void* destination, uint2 vector) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(destination), "r"(vector.x), "r"(vector.y) : "memory");
}

// `kCount` neighbours, read and written at once. Their address must be a multiple of their size; that of store() lies
// in global memory.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Lanes {
  T value[kCount];
  static __device__ Lanes load(const T* source) { return *reinterpret_cast<const Lanes*>(source); }
  __device__ void store(T* destination) const {
    if constexpr (sizeof(Lanes) == sizeof(uint4)) {
      uint4 vector;
      memcpy(&vector, this, sizeof(vector));
      store_vector(destination, vector);
    } else if constexpr (sizeof(Lanes) == sizeof(uint2)) {
      uint2 vector;
      memcpy(&vector, this, sizeof(vector));
      store_vector(destination, vector);
    } else {
      *reinterpret_cast<Lanes*>(destination) = *this;
    }
  }
};

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest, ties to even.
template <typename T, int kCount>
__device__ inline Lanes<T, kCount> narrow(const float (&x)[kCount]) {
  Lanes<T, kCount> result;
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[i], x[i + 1]);
      result.value[i] = pair.x;
      result.value[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) result.value[i] = T(x[i]);
  }
  return result;
}

// One instruction each, a few units in the last place; results below 2^-126 are zero.
__device__ inline float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// value = 1 / (1 + e^-x), complement = 1 - value without cancellation. With T bfloat16 through the fast exponential and
// reciprocal, whose errors are far below its rounding.
struct Sigmoid {
  float value, complement;
};
template <typename T>
__device__ inline Sigmoid sigmoid(float x) {
  constexpr bool kFast = sizeof(T) == 2;
  constexpr float kLog2E = 1.44269504f;
  const float small = kFast ? fast_exp2(-fabsf(x) * kLog2E) : expf(-fabsf(x));
  const float larger = kFast ? fast_reciprocal(1.f + small) : 1.f / (1.f + small), smaller = small * larger;
  return {x < 0.f ? smaller : larger, x < 0.f ? larger : smaller};
}

// Elements in 16 bytes, the widest access.
template <typename T>
inline constexpr int kVector = 16 / sizeof(T);

}  // namespace sluice
