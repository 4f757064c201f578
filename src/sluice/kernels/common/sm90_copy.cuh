// SPDX-License-Identifier: Apache-2.0
// Moving bytes between global and shared memory on Hopper: mbarriers, cp.async, the bulk copy engine.
// An address of type uint32_t is in shared memory, as the instructions want it.
#pragma once

#include <cstdint>

namespace sluice::sm90 {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A barrier in shared memory. It completes a phase when `arrivals` threads have arrived and all announced bytes are
// there.
__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes barrier_init visible to the copy engine; before the __syncthreads that publishes the barriers.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, for `count` arrivals at once.
__device__ inline void barrier_arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces `bytes` that bulk copies will deliver.
__device__ inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of the given parity has completed.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Where a ring of `kStages` buffers stands: the buffer in use and the parity of its current phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Orders this thread's ordinary shared-memory accesses before later ones of the tensor cores and the copy engine.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 16 bytes from global to shared memory; zeros when `valid` is false (nothing is read then).
__device__ inline void copy_16_or_zero(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
// Arrives at the barrier once all earlier copy_16_or_zero of this thread are there; one of the barrier's arrivals.
// Readers through the tensor cores call fence_async_proxy after their wait.
__device__ inline void copy_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The bulk engine: contiguous, 16-byte aligned, a multiple of 16 bytes. Loads report to a barrier; stores to a group.
__device__ inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ inline void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the sources of this thread's bulk stores, but for the last kPending committed groups, may be overwritten.
template <int kPending = 0>
__device__ inline void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until this thread's bulk stores are complete.
__device__ inline void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Programmatic dependent launch. From here on in every CTA, the next kernel of the stream may start, when it was
// launched so that it may.
__device__ inline void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until the kernels before this one are complete.
__device__ inline void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A barrier among `threads` threads of the CTA; ids 1..15 (0 is __syncthreads).
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Moves registers between the warpgroups of a CTA; all warps of a warpgroup call it.
template <int kRegisters>
__device__ inline void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sluice::sm90
