// __syncwarp, shuffles, votes and reductions, which all lanes in the mask must call together.
#pragma once

namespace cuflash::sim {

inline constexpr Operation kSyncwarp{.name = "__syncwarp", .orders_memory = true};
inline constexpr Operation kShuffle{"__shfl_sync", execute_shuffle}, kShuffleXor{"__shfl_xor_sync", execute_shuffle},
    kShuffleUp{"__shfl_up_sync", execute_shuffle}, kShuffleDown{"__shfl_down_sync", execute_shuffle};
inline constexpr Operation kBallot{"__ballot_sync", execute_gather}, kAny{"__any_sync", execute_gather},
    kAll{"__all_sync", execute_gather}, kReduce{"__reduce_sync", execute_gather};

template <class T>
T shuffle(const Operation& operation, uint32_t mask, T value, int source, int width, Location where) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a shuffle moves up to 8 bytes");
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail(where, "%s: width %d is not a power of two from 1 to 32", operation.name, width);
  ShuffleLane lane{0, 0, source};
  std::memcpy(&lane.in, &value, sizeof value);
  collective(operation, mask, &lane, where);
  std::memcpy(&value, &lane.out, sizeof value);
  return value;
}

inline GatherLane gather(const Operation& operation, uint32_t mask, uint32_t value, Location where) {
  GatherLane lane;
  lane.value = value;
  collective(operation, mask, &lane, where);
  return lane;
}

inline uint32_t ballot(const Operation& operation, uint32_t mask, int predicate, uint32_t* participants,
                       Location where) {
  const GatherLane lane = gather(operation, mask, predicate != 0, where);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (lane.participants >> i & 1 ? lane.values[i] : 0u) << i;
  *participants = lane.participants;
  return bits;
}

template <class T, class Combine>
T reduce(uint32_t mask, T value, Combine combine, Location where) {
  const GatherLane lane = gather(kReduce, mask, static_cast<uint32_t>(value), where);
  bool first = true;
  for (int i = 0; i < 32; ++i) {
    if (!(lane.participants >> i & 1)) continue;
    value = first ? static_cast<T>(lane.values[i]) : combine(value, static_cast<T>(lane.values[i]));
    first = false;
  }
  return value;
}

}  // namespace cuflash::sim

inline void __syncwarp(unsigned mask = 0xffffffffu, CUFLASH_SIM_WHERE) {
  ::cuflash::sim::collective(::cuflash::sim::kSyncwarp, mask, nullptr, where);
}

// A lane whose source is outside its segment of `width` lanes keeps its own value.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUFLASH_SIM_WHERE) {
  const int lane = ::cuflash::sim::current->lane, from = (lane & ~(width - 1)) | (source & (width - 1));
  return ::cuflash::sim::shuffle(::cuflash::sim::kShuffle, mask, value, from, width, where);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUFLASH_SIM_WHERE) {
  const int lane = ::cuflash::sim::current->lane, from = lane ^ bits;
  // Unlike the other shuffles, xor may read an earlier segment.
  const int source = from > (lane | (width - 1)) ? lane : from;
  return ::cuflash::sim::shuffle(::cuflash::sim::kShuffleXor, mask, value, source, width, where);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, CUFLASH_SIM_WHERE) {
  const int lane = ::cuflash::sim::current->lane, within = lane & (width - 1);
  const int from = static_cast<unsigned>(within) < distance ? lane : lane - static_cast<int>(distance);
  return ::cuflash::sim::shuffle(::cuflash::sim::kShuffleUp, mask, value, from, width, where);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, CUFLASH_SIM_WHERE) {
  const int lane = ::cuflash::sim::current->lane, within = lane & (width - 1);
  const int from = distance >= static_cast<unsigned>(width - within) ? lane : lane + static_cast<int>(distance);
  return ::cuflash::sim::shuffle(::cuflash::sim::kShuffleDown, mask, value, from, width, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUFLASH_SIM_WHERE) {
  unsigned participants;
  return ::cuflash::sim::ballot(::cuflash::sim::kBallot, mask, predicate, &participants, where);
}
inline int __any_sync(unsigned mask, int predicate, CUFLASH_SIM_WHERE) {
  unsigned participants;
  return ::cuflash::sim::ballot(::cuflash::sim::kAny, mask, predicate, &participants, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUFLASH_SIM_WHERE) {
  unsigned participants;
  return ::cuflash::sim::ballot(::cuflash::sim::kAll, mask, predicate, &participants, where) == participants;
}

#define CUFLASH_SIM_REDUCE(word, T, expression)                               \
  inline T word(unsigned mask, T value, CUFLASH_SIM_WHERE) {                  \
    return ::cuflash::sim::reduce(mask, value, [](T a, T b) -> T { return expression; }, where); \
  }
CUFLASH_SIM_REDUCE(__reduce_add_sync, unsigned, a + b)
CUFLASH_SIM_REDUCE(__reduce_add_sync, int, static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
CUFLASH_SIM_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
CUFLASH_SIM_REDUCE(__reduce_min_sync, int, a < b ? a : b)
CUFLASH_SIM_REDUCE(__reduce_max_sync, unsigned, a < b ? b : a)
CUFLASH_SIM_REDUCE(__reduce_max_sync, int, a < b ? b : a)
CUFLASH_SIM_REDUCE(__reduce_and_sync, unsigned, a & b)
CUFLASH_SIM_REDUCE(__reduce_or_sync, unsigned, a | b)
CUFLASH_SIM_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef CUFLASH_SIM_REDUCE
