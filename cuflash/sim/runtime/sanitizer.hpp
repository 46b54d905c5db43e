// Calls of AddressSanitizer and ThreadSanitizer, which are empty functions without a sanitizer.
//
// The model for ThreadSanitizer: every CUDA thread is a fiber, and every group of asynchronous copies is a fiber too, an
// "engine". Only barriers, __syncwarp, fences and waits order the accesses of fibers, so that a race is detected under
// every schedule. Only kernels are instrumented; the runtime reports the accesses that it makes on behalf of kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(CUFLASH_SIM_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CUFLASH_SIM_THREAD)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void __tsan_func_entry(void* caller);
void __tsan_func_exit();
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace cuflash::sim {

#if defined(CUFLASH_SIM_ADDRESS) || defined(CUFLASH_SIM_THREAD)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

#if defined(CUFLASH_SIM_THREAD)
constexpr unsigned kSwitchWithoutSync = 1;

inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void* new_fiber(const char* name) {
  void* fiber = __tsan_create_fiber(0);
  __tsan_set_fiber_name(fiber, name);
  return fiber;
}
inline void before_switch_to_fiber(void* fiber) { __tsan_switch_to_fiber(fiber, kSwitchWithoutSync); }
inline void acquire(void* clock) { __tsan_acquire(clock); }
inline void release(void* clock) { __tsan_release(clock); }
inline void kernel_reads(const void* address, size_t bytes) { __tsan_read_range(const_cast<void*>(address), bytes); }
inline void kernel_writes(void* address, size_t bytes) { __tsan_write_range(address, bytes); }

// Hides the runtime's own accesses, including those inside malloc and memcpy.
struct Unwatched {
  Unwatched() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
  ~Unwatched() { AnnotateIgnoreReadsEnd("", 0), AnnotateIgnoreWritesEnd("", 0); }
};

// Puts the kernel's line, the return address of the operation, on top of a report's stack.
struct Frame {
  explicit Frame(void* caller) { __tsan_func_entry(caller); }
  ~Frame() { __tsan_func_exit(); }
};

// Runs `work` on the engine's fiber, whose accesses are ordered only after those that it has acquired.
template <class Work>
void as_engine(void* engine, void* caller, Work&& work) {
  void* self = this_fiber();
  before_switch_to_fiber(engine);
  {
    Frame frame(caller);
    work();
  }
  before_switch_to_fiber(self);
}
#else
inline void* this_fiber() { return nullptr; }
inline void* new_fiber(const char*) { return nullptr; }
inline void before_switch_to_fiber(void*) {}
inline void acquire(void*) {}
inline void release(void*) {}
inline void kernel_reads(const void*, size_t) {}
inline void kernel_writes(void*, size_t) {}
struct Unwatched {
  Unwatched() {}
  ~Unwatched() {}
};
struct Frame {
  explicit Frame(void*) {}
  ~Frame() {}
};
template <class Work>
void as_engine(void*, void*, Work&& work) { work(); }
#endif

#if defined(CUFLASH_SIM_ADDRESS)
inline void leave_stack(void** fake_stack, const char* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
}
inline void enter_stack(void* fake_stack) { __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr); }
inline void poison(const void* address, size_t bytes) { __asan_poison_memory_region(address, bytes); }
inline void unpoison(const void* address, size_t bytes) { __asan_unpoison_memory_region(address, bytes); }
inline void* first_poisoned(const void* address, size_t bytes) {
  return __asan_region_is_poisoned(const_cast<void*>(address), bytes);
}
#else
inline void leave_stack(void**, const char*, size_t) {}
inline void enter_stack(void*) {}
inline void poison(const void*, size_t) {}
inline void unpoison(const void*, size_t) {}
inline void* first_poisoned(const void*, size_t) { return nullptr; }
#endif

}  // namespace cuflash::sim
