// Copies of whole tiles between global and shared memory by the tensor memory accelerator; one thread issues each copy.
// A tensor map describes a tensor of up to five dimensions in global memory (the contiguous dimension first), the box
// that one copy moves, and the swizzle in shared memory. Coordinates are those of the box's first element; x0 must be
// at a multiple of 16 bytes. Elements of a box outside the tensor are read as zeros and not written. A box is
// contiguous in shared memory and starts at a multiple of 128 bytes; a swizzle permutes its chunks by bits of the
// address, as described at Swizzle in ptx/wgmma.cuh.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-tensor-copy (sm_90)
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

// An opaque record that cuTensorMapEncodeTiled writes. It is passed only as a __grid_constant__ parameter.
struct alignas(64) TensorMap { uint64_t words[16]; };

// The eviction policy of the L2 cache for the data that a copy reads.
enum class Cache : uint64_t {
  kNormal = 0x1000000000000000, kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000
};

CUFLASH_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Make this thread's writes to shared memory, and those that it observed through a barrier, visible to bulk copies and
// wgmma that are issued later, by this thread or, after a barrier, by others. Data that a bulk copy wrote are visible
// to wgmma without this fence.
CUFLASH_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Order the accesses of threads to global memory relative to those of bulk copies.
CUFLASH_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- copies to shared memory: the mbarrier counts all bytes of the box, including the zeros outside the tensor ----

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

// Prefetch a box into the L2 cache for a later copy.
CUFLASH_DEVICE void tma_prefetch_5d(const TensorMap* map, int x0, int x1, int x2, int x3, int x4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(x0), "r"(x1),
               "r"(x2), "r"(x3), "r"(x4)
               : "memory");
}

// Copy consecutive bytes; the addresses and the number of bytes must be multiples of 16.
CUFLASH_DEVICE void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(destination), "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// ---- copies to global memory: they join this thread's open group of bulk copies; coordinates must not be negative
// ----

CUFLASH_DEVICE void tma_store_4d(const TensorMap* map, uint32_t source, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}

// Copy a box from shared memory. The first lane issues the copy; whole warps call this, since the compiler would
// serialize wgmma around a branch that a single lane takes.
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

// Add a box to global memory element by element, in the map's element type.
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

// Copy consecutive bytes. The first lane issues the copy; whole warps call this, for the reason at tma_store_5d.
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

// Add consecutive floats. The first lane issues the copy; whole warps call this, for the reason at tma_store_5d.
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

// Close the group of all copies to global memory that this thread has issued since its last commit; an empty group
// counts too.
CUFLASH_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all groups of this thread except the newest kPending have read their sources, which may then be
// overwritten.
template <int kPending>
CUFLASH_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Wait until all groups of this thread except the newest kPending have completed and their writes are visible to this
// thread.
template <int kPending>
CUFLASH_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuflash::ptx
