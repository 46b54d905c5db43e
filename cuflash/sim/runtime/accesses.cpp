// Accesses to global memory: kernels are built with the instrumentation of ThreadSanitizer, whose functions are defined here.
#include "residents.hpp"

namespace cuflash::sim {

namespace {

constexpr int kMostAccesses = 4096;   // by a thread that polls memory without an operation, before another thread runs

bool is_global(const void* address) {
  const auto* const byte = static_cast<const unsigned char*>(address);
  const Residents& residents = *launch->residents;
  const auto* const stack = reinterpret_cast<const unsigned char*>(self().stack);
  return !(byte >= residents.shared && byte < residents.shared + residents.shared_bytes) &&
         !(byte >= stack && byte < stack + kStackBytes);
}

// Lets another thread run, which may happen at any access to global memory.
void maybe_lose_turn() {
  Residents& residents = *launch->residents;
  const bool is_random = launch->request.schedule.order == Order::random && launch->random.one_in(32);
  if (!is_random && ++residents.accesses < kMostAccesses) return;
  Thread& me = self();
  check_time_limit(me.where);
  set_ready(me);
  if (is_random || !run_other_block(me)) schedule(false);
}

}  // namespace

void note_access(const Cta& cta, const void* address, size_t bytes, Kind kind, Line line) {
  Residents* const residents = launch->residents;
  if (residents && residents->are_accesses_reported) residents->ordering.note(cta.number, address, bytes, kind, line);
}

}  // namespace cuflash::sim

#if !defined(CUFLASH_SIM_THREAD)
// Functions that the compiler calls before each access, and instead of each atomic operation.
namespace cuflash::sim {
namespace {

void report(const volatile void* place, size_t bytes, Kind kind, const void* instruction) {
  void* const address = const_cast<void*>(place);
  if (!launch->residents || !is_global(address)) return;
  launch->in_kernel.store(false, std::memory_order_relaxed);
  launch->residents->are_accesses_reported = true;
  if (kind == Kind::read || kind == Kind::write) maybe_lose_turn();
  note_access(*self().cta, address, bytes, kind, {instruction, {}});
  launch->in_kernel.store(true, std::memory_order_relaxed);
}

}  // namespace
}  // namespace cuflash::sim

#define CUFLASH_SIM_REPORT(bytes, kind) \
  cuflash::sim::report(address, bytes, cuflash::sim::Kind::kind, __builtin_return_address(0))
#define CUFLASH_SIM_ACCESS(bytes)                                                                        \
  void __tsan_read##bytes(void* address) { CUFLASH_SIM_REPORT(bytes, read); }                            \
  void __tsan_unaligned_read##bytes(void* address) { CUFLASH_SIM_REPORT(bytes, read); }                  \
  void __tsan_write##bytes(void* address) { CUFLASH_SIM_REPORT(bytes, write); }                          \
  void __tsan_unaligned_write##bytes(void* address) { CUFLASH_SIM_REPORT(bytes, write); }
#define CUFLASH_SIM_ATOMIC_ACCESS(bits, T)                                                               \
  T __tsan_atomic##bits##_load(const volatile T* address, int) {                                         \
    CUFLASH_SIM_REPORT(sizeof(T), atomic_read);                                                          \
    return __atomic_load_n(address, __ATOMIC_RELAXED);                                                   \
  }                                                                                                      \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* address, T* expected, T value, int, int) { \
    CUFLASH_SIM_REPORT(sizeof(T), atomic_write);                                                         \
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
  }
extern "C" {
CUFLASH_SIM_ACCESS(1)
CUFLASH_SIM_ACCESS(2)
CUFLASH_SIM_ACCESS(4)
CUFLASH_SIM_ACCESS(8)
CUFLASH_SIM_ACCESS(16)
CUFLASH_SIM_ATOMIC_ACCESS(8, uint8_t)
CUFLASH_SIM_ATOMIC_ACCESS(16, uint16_t)
CUFLASH_SIM_ATOMIC_ACCESS(32, uint32_t)
CUFLASH_SIM_ATOMIC_ACCESS(64, uint64_t)
void __tsan_read_range(void* address, unsigned long bytes) { CUFLASH_SIM_REPORT(bytes, read); }
void __tsan_write_range(void* address, unsigned long bytes) { CUFLASH_SIM_REPORT(bytes, write); }
void __tsan_init() {}
}
#undef CUFLASH_SIM_REPORT
#undef CUFLASH_SIM_ACCESS
#undef CUFLASH_SIM_ATOMIC_ACCESS
#endif
