// Atomic functions, relaxed as on the GPU: they are atomic, but do not order other accesses. They use the compiler's
// atomics, which ThreadSanitizer recognizes. Each lets other threads run, because its thread may be spinning.
#pragma once

namespace cuflash::sim {

template <class T, class Change>
__forceinline__ T atomic_change(T* pointer, const char* name, Location where, Change change) {
  check_aligned(pointer, sizeof(T), name, where);
  T old;
  __atomic_load(pointer, &old, __ATOMIC_RELAXED);
  for (T made = change(old); !__atomic_compare_exchange(pointer, &old, &made, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
       made = change(old)) {}
  spin(where);
  return old;
}

template <class T>
T wrapping_sum(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
  else
    return a + b;
}

}  // namespace cuflash::sim

#define CUFLASH_SIM_ATOMIC(word, expression)                                                     \
  template <class T>                                                                             \
  __forceinline__ T word(T* pointer, std::type_identity_t<T> value, CUFLASH_SIM_WHERE) {           \
    return ::cuflash::sim::atomic_change(pointer, #word, where, [=](T old) -> T { return expression; }); \
  }
CUFLASH_SIM_ATOMIC(atomicAdd, ::cuflash::sim::wrapping_sum(old, value))
CUFLASH_SIM_ATOMIC(atomicSub, static_cast<T>(old - value))
CUFLASH_SIM_ATOMIC(atomicMin, value < old ? value : old)
CUFLASH_SIM_ATOMIC(atomicMax, old < value ? value : old)
CUFLASH_SIM_ATOMIC(atomicExch, (static_cast<void>(old), value))
CUFLASH_SIM_ATOMIC(atomicAnd, old & value)
CUFLASH_SIM_ATOMIC(atomicOr, old | value)
CUFLASH_SIM_ATOMIC(atomicXor, old ^ value)
#undef CUFLASH_SIM_ATOMIC

template <class T>
__forceinline__ T atomicCAS(T* pointer, std::type_identity_t<T> expected, std::type_identity_t<T> value,
                            CUFLASH_SIM_WHERE) {
  return ::cuflash::sim::atomic_change(pointer, "atomicCAS", where,
                                       [=](T old) -> T { return old == expected ? value : old; });
}
