// Copies of whole tiles between global and shared memory by the tensor memory accelerator, each issued by one thread. A
// tensor map describes a tensor of up to five dimensions in global memory, the contiguous one first, the box that one
// copy moves, and the swizzle of shared memory. Coordinates are those of the box's first element; x0 is a multiple of
// 16 bytes. Elements of a box outside of the tensor are read as zeros, and not written. A box is contiguous in shared
// memory, from a multiple of 128 bytes on; a swizzle permutes by bits of the address, as Swizzle in ptx/wgmma.cuh says.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-tensor-copy (sm_90)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// An opaque record that cuTensorMapEncodeTiled writes. It is passed only as a __grid_constant__ parameter.
struct alignas(64) TensorMap { uint64_t words[16]; };

// How long the L2 cache keeps the data that a copy reads.
enum class Cache : uint64_t {
  kNormal = 0x1000000000000000, kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000
};

CUFLASH_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes this thread's writes to shared memory, and those that it observed through a barrier, visible to bulk copies and wgmma
// that are issued later, also by other threads after a barrier. wgmma sees data that a bulk copy wrote without this fence.
CUFLASH_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders accesses of threads to global memory with those of bulk copies.
CUFLASH_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- to shared memory: the mbarrier counts as many bytes as the box has, zeros included ----

CUFLASH_DEVICE void tma_load_4d(uint32_t destination, const TensorMap* map, uint32_t barrier, int x0, int x1, int x2,
                                int x3, Cache cache = Cache::kNormal) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
               "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "l"(static_cast<uint64_t>(cache))
               : "memory");
}

CUFLASH_DEVICE void tma_load_5d(uint32_t destination, const TensorMap* map, uint32_t barrier, int x0, int x1, int x2,
                                int x3, int x4, Cache cache = Cache::kNormal) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
               "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "l"(static_cast<uint64_t>(cache))
               : "memory");
}

// Prefetches a box into the L2 cache, where a later copy finds it.
CUFLASH_DEVICE void tma_prefetch_5d(const TensorMap* map, int x0, int x1, int x2, int x3, int x4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(x0), "r"(x1),
               "r"(x2), "r"(x3), "r"(x4)
               : "memory");
}

// Copies consecutive bytes; addresses and the number of bytes are multiples of 16.
CUFLASH_DEVICE void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(destination), "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// ---- to global memory: part of this thread's group of bulk copies; coordinates are 0 or more ----

CUFLASH_DEVICE void tma_store_4d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}

// The first lane issues the copy; whole warps call this, since inside a branch of one lane the compiler would serialize wgmma.
CUFLASH_DEVICE void tma_store_5d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3, int x4) {
  asm volatile("{\n"
               ".reg .pred is_first;\n"
               ".reg .u32 lane;\n"
               "mov.u32 lane, %%laneid;\n"
               "setp.eq.u32 is_first, lane, 0;\n"
               "@is_first cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n"
               "}" ::"l"(map),
               "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
               : "memory");
}

// Adds to the values in global memory, element by element, in the map's type.
CUFLASH_DEVICE void tma_add_4d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :
               : "l"(map), "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}

CUFLASH_DEVICE void tma_add_5d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3, int x4) {
  asm volatile("cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               :
               : "l"(map), "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
               : "memory");
}

// The first lane issues the copy; whole warps call this, for the reason at tma_store_5d.
CUFLASH_DEVICE void bulk_store(void* destination, uint32_t source, int bytes) {
  asm volatile("{\n"
               ".reg .pred is_first;\n"
               ".reg .u32 lane;\n"
               "mov.u32 lane, %%laneid;\n"
               "setp.eq.u32 is_first, lane, 0;\n"
               "@is_first cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
               "}"
               :
               : "l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

// Adds floats. The first lane issues the copy; whole warps call this, for the reason at tma_store_5d.
CUFLASH_DEVICE void bulk_add(float* destination, uint32_t source, int bytes) {
  asm volatile("{\n"
               ".reg .pred is_first;\n"
               ".reg .u32 lane;\n"
               "mov.u32 lane, %%laneid;\n"
               "setp.eq.u32 is_first, lane, 0;\n"
               "@is_first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
               "}"
               :
               : "l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

// Closes the group of all copies to global memory that this thread issued since its last commit; empty ones count too.
CUFLASH_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the newest kPending groups of this thread have read their sources, which may then be overwritten.
template <int kPending>
CUFLASH_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the newest kPending groups of this thread have completed and their writes are visible to this thread.
template <int kPending>
CUFLASH_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuflash::ptx
