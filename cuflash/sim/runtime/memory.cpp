// Shared memory: checked conversion of addresses to bytes and back.
#include "memory.hpp"

namespace cuflash::sim {

unsigned char* dynamic_shared() { return self().cta->shared; }

uint32_t shared_address(const void* pointer, Location where) {
  const Cta& cta = *self().cta;
  const auto offset = static_cast<const unsigned char*>(pointer) - cta.shared;
  if (offset < 0 || static_cast<size_t>(offset) > cta.shared_bytes)
    fail(where, "shared_address: the pointer is not into the %zu bytes of dynamic shared memory", cta.shared_bytes);
  return static_cast<uint32_t>(offset) + kSharedBase;
}

void report_address(uint32_t address, size_t bytes, size_t alignment, const char* name, Location where) {
  const long long offset = static_cast<long long>(address) - kSharedBase;
  if (address % alignment)
    fail(where, "%s: shared address must be a multiple of %zu; got offset %lld", name, alignment, offset);
  fail(where, "%s: %zu bytes at shared offset %lld are outside the %zu bytes of dynamic shared memory", name, bytes,
       offset, self().cta->shared_bytes);
}

void report_unfenced(size_t offset, const char* name, Location where) {
  fail(where, "%s reads shared offset %zu, which a thread wrote to without fence_proxy_async after it", name, offset);
}

void check_aligned(const void* pointer, size_t alignment, const char* name, Location where) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment)
    fail(where, "%s: address must be a multiple of %zu; got %p", name, alignment, pointer);
}

void load_row(uint32_t address, MatrixLane& lane, const char* name, Location where) {
  Frame frame(__builtin_return_address(0));
  const unsigned char* row = shared_bytes(address, sizeof lane.row, sizeof lane.row, name, where);
  kernel_reads(row, sizeof lane.row);
  Entry entry(name, where);
  memcpy(lane.row, row, sizeof lane.row);
}

void store_row(uint32_t address, const MatrixLane& lane, const char* name, Location where) {
  Frame frame(__builtin_return_address(0));
  unsigned char* row = shared_bytes(address, sizeof lane.row, sizeof lane.row, name, where);
  kernel_writes(row, sizeof lane.row);
  Entry entry(name, where);
  memcpy(row, lane.row, sizeof lane.row);
}

}  // namespace cuflash::sim
