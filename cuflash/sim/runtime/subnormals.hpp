// Makes the floating-point operations of a host thread flush subnormal operands and results to 0, as float operations
// do in kernels that NVRTC compiles with -ftz=true. The setting also affects doubles, which a GPU never flushes.
// Hosts other than x86-64 and aarch64 never flush.
#pragma once

#include <cstdint>

namespace cuflash::sim {

#if defined(__x86_64__)
constexpr uint64_t kFlushes = 0x8040;  // of MXCSR: flush results, flush operands
inline uint64_t float_mode() {
  uint32_t mode;
  asm volatile("stmxcsr %0" : "=m"(mode) : : "memory");
  return mode;
}
inline void set_float_mode(uint64_t mode) {
  const auto word = static_cast<uint32_t>(mode);
  asm volatile("ldmxcsr %0" : : "m"(word) : "memory");
}
#elif defined(__aarch64__)
constexpr uint64_t kFlushes = 1 << 24;  // of FPCR
inline uint64_t float_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
  return mode;
}
inline void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
constexpr uint64_t kFlushes = 0;
inline uint64_t float_mode() { return 0; }
inline void set_float_mode(uint64_t) {}
#endif

// Flushes subnormal numbers, or keeps them, until the end of its scope. Code in the scope must load its operands from
// memory and store its results, since compilers may move other floating-point operations out of it.
class Subnormals {
 public:
  explicit Subnormals(bool are_flushed) : before_(float_mode()) {
    set_float_mode(are_flushed ? before_ | kFlushes : before_ & ~kFlushes);
  }
  ~Subnormals() { set_float_mode(before_); }
  Subnormals(const Subnormals&) = delete;
  Subnormals& operator=(const Subnormals&) = delete;

 private:
  const uint64_t before_;
};

}  // namespace cuflash::sim
