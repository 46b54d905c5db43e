// Checked access to the current block's shared memory.
#pragma once

#include <cstring>

#include "cta.hpp"

namespace cuflash::sim {

[[noreturn]] void report_address(uint32_t address, size_t bytes, size_t alignment, const char* name, Location where);
[[noreturn]] void report_unfenced(size_t offset, const char* name, Location where);

// Returns the bytes at a shared address, or ends the launch with a failure that names the operation.
inline unsigned char* shared_bytes(uint32_t address, size_t bytes, size_t alignment, const char* name, Location where) {
  const Cta& cta = *self().cta;
  const size_t offset = size_t{address} - kSharedBase;
  if (address % alignment || address < kSharedBase || offset + bytes > cta.shared_bytes)
    report_address(address, bytes, alignment, name, where);
  return cta.shared + offset;
}

// Reports bytes that an asynchronous operation would read before a fence made them visible to it.
inline void check_fenced(const unsigned char* from, size_t bytes, const char* name, Location where) {
  Cta& cta = *self().cta;
  if (cta.is_view_late) update_view(cta);
  const auto offset = static_cast<size_t>(from - cta.shared);
  if (memcmp(&cta.proxy_view[offset], from, bytes) != 0) report_unfenced(offset, name, where);
}

// Swizzled address of a 16-byte chunk in rows of row_bytes (128, 64 or 32); rows of 16 bytes are not swizzled.
inline uint32_t swizzled(uint32_t address, uint32_t row_bytes) {
  return address ^ ((address >> 7 & ((row_bytes >> 4) - 1)) << 4);
}

}  // namespace cuflash::sim
