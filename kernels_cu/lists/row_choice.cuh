#pragma once
#include <lists/selection.cuh>
#include <ptx/math.cuh>
#include <ptx/shared.cuh>

// Chooses blocks in a row of a grid: those with the highest scores, up to a budget; of equal scores, the lower index
// first; forced blocks before all others. The order of the blocks is given by numbers that are called places: a block
// with a lower place is chosen earlier. The last chosen place is found by bisection, which counts the blocks before a
// place, or sums their shares. cuflash/selectors/budget.py is the specification.
namespace cuflash::lists {

using Accumulator = Config::Accumulator;

constexpr uint32_t kForcedPlace = 0, kNotEligiblePlace = ~0u;

// Return a quotient rounded down, for a positive divisor. Division of 32 bits takes a fraction of the time.
CUFLASH_DEVICE int64_t floor_divided(int64_t x, int32_t by) {
  if (x >= 0 && x <= 0x7fffffff) return static_cast<int32_t>(x) / by;
  return x >= 0 ? x / by : -((by - 1 - x) / by);
}

// Return the place of a score. Places have the order of the scores, the highest first: -0 equals 0, and NaN is below all
// numbers.
CUFLASH_DEVICE uint32_t place_of(float score) {
  const float negated = 0.0f - (score != score ? ptx::negative_infinity<float>() : score);
  const int32_t bits = static_cast<int32_t>(__float_as_uint(negated));
  return static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
}

// Return the sum over the lanes of a warp. Called by whole warps.
template <class T>
CUFLASH_DEVICE T sum_of_warp(T x) {
  for (int lane_offset = 1; lane_offset < 32; lane_offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, lane_offset);
  return x;
}

// A warp that chooses from a row. All of its threads call each member function of `Row`.
struct WarpOfRow {
  static constexpr int kThreads = 32;

  CUFLASH_DEVICE int index() const { return ptx::lane(); }
  CUFLASH_DEVICE void wait() const { __syncwarp(); }
  template <class T>
  CUFLASH_DEVICE T sum(T x) const {
    return sum_of_warp(x);
  }
};

// A thread block that chooses from a row. All of its threads call each member function of `Row`. Its warps add their
// sums in shared memory, always in the same order.
struct BlockOfRow {
  static constexpr int kThreads = kSelectionThreads;
  static constexpr int kBytes = sizeof(double) * Config::kNumWarps;
  static_assert(Config::kNumWarps <= 32, "a lane has the sum of a warp");

  void* sums;  // kBytes of shared memory

  CUFLASH_DEVICE int index() const { return ptx::thread_index(); }
  CUFLASH_DEVICE void wait() const { __syncthreads(); }
  template <class T>
  CUFLASH_DEVICE T sum(T x) const {
    T* const of_warps = static_cast<T*>(sums);
    x = sum_of_warp(x);
    if (ptx::lane() == 0) of_warps[ptx::thread_index() / 32] = x;
    __syncthreads();  // all warps have written their sums
    x = sum_of_warp(ptx::lane() < Config::kNumWarps ? of_warps[ptx::lane()] : T(0));
    __syncthreads();  // all warps have read the sums
    return x;
  }
};

// The end of the chosen blocks: all blocks with earlier places are chosen, and the blocks with this place up to a
// column.
struct End {
  uint32_t place;
  int column;

  CUFLASH_DEVICE bool is_before(const End& other) const {
    return place != other.place ? place < other.place : column < other.column;
  }
};

// A row of the grid: which of its blocks may be kept, and which must be kept.
struct BlocksOfRow {
  const Choice& choice;
  int number;  // of the row
  int64_t first;  // number of the row's first cell
  int64_t diagonal_first, diagonal_last;  // first and last column on the diagonal
  int64_t last_key;  // the last key that the row's last query attends under a causal mask
  int num_columns;  // columns after the last one that may be eligible are not visited

  CUFLASH_DEVICE BlocksOfRow(const Choice& of, int row)
      : choice(of), number(row), first(static_cast<int64_t>(row) * of.num_kv_blocks) {
    const int64_t start = static_cast<int64_t>(row % of.num_q_blocks) * of.block_q, stop = start + of.block_q;
    diagonal_first = floor_divided(start + of.offset, of.block_kv);
    last_key = (stop < of.seqlen_q ? stop : of.seqlen_q) + of.offset - 1;
    diagonal_last = floor_divided(last_key, of.block_kv);
    const bool is_cut = of.is_causal && diagonal_last + 1 < of.num_kv_blocks;
    num_columns = is_cut ? (diagonal_last >= 0 ? static_cast<int>(diagonal_last) + 1 : 0) : of.num_kv_blocks;
  }

  CUFLASH_DEVICE bool is_eligible(int column) const {
    return (!choice.is_causal || column <= diagonal_last) &&
           (!choice.is_past_only || (column + 1) * static_cast<int64_t>(choice.block_kv) <= last_key + 1 ||
            is_forced(column)) &&
           (choice.allowed == nullptr || choice.allowed[first + column]);
  }

  CUFLASH_DEVICE bool is_forced(int column) const {
    if (column <= diagonal_last) {
      const int64_t start = diagonal_last - (choice.num_local - 1);
      if (column >= start || (choice.has_diagonal && column >= diagonal_first)) return true;
    }
    return column < choice.num_sinks || (choice.forced != nullptr && choice.forced[first + column]);
  }
};

// Scores and shares that are stored as arrays.
struct StoredScores {
  CUFLASH_DEVICE Accumulator score(const BlocksOfRow& row, int column) const {
    return static_cast<const Accumulator*>(row.choice.scores)[row.first + column];
  }
  CUFLASH_DEVICE double share(const BlocksOfRow& row, int column) const {
    if (row.choice.shares == nullptr) return 1.0;
    return static_cast<double>(static_cast<const Accumulator*>(row.choice.shares)[row.first + column]);
  }
};

// A row of the grid, with its scores and the threads that choose from it.
template <class Threads, class Scores = StoredScores>
struct Row : BlocksOfRow {
  const Threads threads;
  const Scores scores;
  uint32_t* places = nullptr;  // the places of the row's blocks, if they are stored

  CUFLASH_DEVICE Row(const Choice& of, int row, Threads of_row, Scores of_blocks = {})
      : BlocksOfRow(of, row), threads(of_row), scores(of_blocks) {}

  CUFLASH_DEVICE Accumulator score(int column) const { return scores.score(*this, column); }
  CUFLASH_DEVICE double share(int column) const { return scores.share(*this, column); }

  CUFLASH_DEVICE uint32_t place(int column) const { return places == nullptr ? new_place(column) : places[column]; }

  // Store the places of all blocks in shared memory.
  CUFLASH_DEVICE void keep_places(uint32_t* storage) {
    for (int column = threads.index(); column < num_columns; column += Threads::kThreads)
      storage[column] = new_place(column);
    threads.wait();
    places = storage;
  }

  // Return the place of a block.
  CUFLASH_DEVICE uint32_t new_place(int column) const {
    if (!is_eligible(column)) return kNotEligiblePlace;
    return is_forced(column) ? kForcedPlace : place_of(static_cast<float>(score(column)));
  }

  // Return the number or, in the second function, the sum of shares, of the blocks whose places come before
  // `place_of_end`.
  CUFLASH_DEVICE int count_before(uint32_t place_of_end) const {
    int count = 0;
    for (int column = threads.index(); column < num_columns; column += Threads::kThreads)
      count += place(column) < place_of_end;
    return threads.sum(count);
  }
  CUFLASH_DEVICE double shares_before(uint32_t place_of_end) const {
    double sum = 0;
    for (int column = threads.index(); column < num_columns; column += Threads::kThreads)
      sum += place(column) < place_of_end ? share(column) : 0.0;
    return threads.sum(sum);
  }

  // Return the greatest place for which `is_taken` holds. It must hold for 0 and, if it fails for a place, fail for all
  // later ones.
  template <class IsTaken>
  static CUFLASH_DEVICE uint32_t last_place(IsTaken is_taken) {
    uint32_t found = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit /= 2)
      if (is_taken(found | bit)) found |= bit;
    return found;
  }

  // Return the end of the first `count` blocks.
  CUFLASH_DEVICE End end_of_count(int count) const {
    uint32_t exact = 0;  // a place before which there are exactly `count` blocks, if the search tests one
    const uint32_t last = last_place([&](uint32_t at) {
      if (exact != 0) return at < exact;
      const int before = count_before(at);
      if (before == count) exact = at;
      return before < count;
    });
    if (exact != 0) return {exact, -1};
    int missing = count - count_before(last), end = -1;
    for (int start = 0; start < num_columns && missing > 0; start += Threads::kThreads) {
      if constexpr (Threads::kThreads > 32) {
        const int count_of_run = threads.sum(static_cast<int>(is_at(start + threads.index(), last)));
        if (count_of_run <= missing) {  // all blocks of this run with this place are chosen
          missing -= count_of_run;
          end = start + Threads::kThreads - 1;
          continue;
        }
      }
      for (int from = start; from < start + Threads::kThreads && missing > 0; from += 32) {
        uint32_t equal = __ballot_sync(0xffffffffu, is_at(from + ptx::lane(), last));
        for (; equal != 0 && missing > 0; equal &= equal - 1, --missing) end = from + __ffs(equal) - 1;
      }
    }
    return {last, end};
  }

  // Return the end of the shortest prefix of blocks whose shares sum to at least `mass` times the sum of all shares, or
  // the end of all blocks if a share is NaN.
  CUFLASH_DEVICE End end_of_mass(double mass) const {
    const double needed = mass * shares_before(kNotEligiblePlace);
    const uint32_t last = last_place([&](uint32_t at) { return !(shares_before(at) >= needed); });
    double sum = shares_before(last);
    int end = -1;
    for (int start = 0; start < num_columns && !(sum >= needed); start += Threads::kThreads) {
      if constexpr (Threads::kThreads > 32) {
        const int column = start + threads.index();
        const double sum_of_run = threads.sum(is_at(column, last) ? share(column) : 0.0);
        if (!(sum + sum_of_run >= needed)) {  // all blocks of this run with this place are chosen
          sum += sum_of_run;
          end = start + Threads::kThreads - 1;
          continue;
        }
      }
      for (int from = start; from < start + Threads::kThreads && !(sum >= needed); from += 32) {
        uint32_t equal = __ballot_sync(0xffffffffu, is_at(from + ptx::lane(), last));
        for (; equal != 0 && !(sum >= needed); equal &= equal - 1) {
          end = from + __ffs(equal) - 1;
          sum += share(end);
        }
      }
    }
    return {last, end};
  }

  // Return whether a block has a place.
  CUFLASH_DEVICE bool is_at(int column, uint32_t at) const {
    return column < num_columns && place(column) == at;
  }
};

// Write the columns for which `is_kept` holds, ascending, as a list whose rest is filled with -1. Called by a warp.
template <class IsKept>
CUFLASH_DEVICE void write_list(int32_t* list, int length, int num_columns, IsKept is_kept) {
  int count = 0;
  for (int start = 0; start < num_columns && count < length; start += 32) {
    const int column = start + ptx::lane();
    const uint32_t bits = __ballot_sync(0xffffffffu, column < num_columns && is_kept(column));
    const int at = count + __popc(bits & ((1u << ptx::lane()) - 1));
    if ((bits >> ptx::lane() & 1) != 0 && at < length) list[at] = column;
    count += __popc(bits);
  }
  for (int at = count + ptx::lane(); at < length; at += 32) list[at] = -1;
}

// Write which blocks of a row are kept. `storage` is shared memory for the row's places, if they are stored.
template <class Threads, class Scores>
CUFLASH_DEVICE void choose_of_row(Row<Threads, Scores>& row, uint32_t* storage) {
  const Choice& choice = row.choice;
  if (choice.keeps_places) row.keep_places(storage);
  End end{kForcedPlace, choice.num_kv_blocks};
  if (choice.count > 0) {
    const End of_count = row.end_of_count(choice.count);
    if (end.is_before(of_count)) end = of_count;
  }
  if (choice.mass > 0) {
    const End of_mass = row.end_of_mass(choice.mass);
    if (end.is_before(of_mass)) end = of_mass;
  }
  End of_all{kNotEligiblePlace, -1};
  if (choice.most > 0) of_all = row.end_of_count(choice.most);
  const auto is_kept = [&](int column) {
    if (column >= row.num_columns) return false;
    const End at{row.place(column), column};
    if (at.place == kNotEligiblePlace || of_all.is_before(at)) return false;
    return !end.is_before(at) ||
           (choice.has_threshold && row.score(column) >= static_cast<Accumulator>(choice.threshold));
  };
  const int64_t number = row.number;
  if (choice.list_length > 0) {
    if (row.threads.index() < 32)
      write_list(reinterpret_cast<int32_t*>(choice.kept) + number * choice.list_length, choice.list_length,
                 row.num_columns, is_kept);
    return;
  }
  if constexpr (Threads::kThreads > 32) {
    if (choice.keeps_bits) {
      const int num_words = (choice.num_kv_blocks + 31) / 32;
      uint32_t* const words = reinterpret_cast<uint32_t*>(choice.kept) + number * num_words;
      for (int word = row.threads.index() / 32; word < num_words; word += Threads::kThreads / 32) {
        const int column = word * 32 + ptx::lane();
        const uint32_t bits = __ballot_sync(0xffffffffu, column < choice.num_kv_blocks && is_kept(column));
        if (ptx::lane() == 0) words[word] = bits;
      }
      return;
    }
  }
  for (int column = row.threads.index(); column < choice.num_kv_blocks; column += Threads::kThreads)
    choice.kept[row.first + column] = is_kept(column);
}

}  // namespace cuflash::lists
