#pragma once
#include <lists/place_search.cuh>

// Chooses blocks of many rows at once: two lanes of a warp share a row, whose scores are in shared memory. It makes the
// choice of `choose_of_row` for rules that have only a number of blocks. Each pass over the columns takes a few
// instructions for 16 rows, and only the two lanes of a row exchange numbers.
namespace cuflash::lists {

constexpr int kRowsOfLanes = 16;  // rows of a warp
constexpr int kRun = 16;  // lanes 0 to 15 have the columns 0 to 15, 32 to 47, ..., and the others those between them

// Return the bits of a run that starts at a column and whose columns are in first <= column < stop.
CUFLASH_DEVICE uint32_t bits_of_run(int start, int first, int stop) {
  const int from = max(first - start, 0), to = min(stop - start, kRun);
  return from < to ? (1u << to) - (1u << from) : 0u;
}

// The columns of a row that must be kept, and those among which scores choose.
struct ColumnsOfRow {
  int num_columns;  // 0 in lanes without a row
  int num_sinks, first_forced, stop_forced;  // columns before num_sinks, and the run of these two, must be kept
  int stop_free;  // other columns may be kept if they come before this one

  CUFLASH_DEVICE ColumnsOfRow(const BlocksOfRow& row, bool has_row) {
    const Choice& choice = row.choice;
    num_columns = has_row ? row.num_columns : 0;
    num_sinks = min(choice.num_sinks, num_columns);
    const int64_t local = row.diagonal_last - (choice.num_local - 1);
    const int64_t first = choice.has_diagonal && row.diagonal_first < local ? row.diagonal_first : local;
    stop_forced = within(row.diagonal_last + 1);
    first_forced = min(within(first), stop_forced);
    stop_free = choice.is_past_only ? within(floor_divided(row.last_key + 1, choice.block_kv)) : num_columns;
  }

  CUFLASH_DEVICE bool is_forced(int column) const {
    return column < num_sinks || (column >= first_forced && column < stop_forced);
  }
  CUFLASH_DEVICE bool is_free(int column) const { return column < stop_free && !is_forced(column); }
  CUFLASH_DEVICE int num_forced() const {
    return num_sinks + max(0, stop_forced - max(first_forced, num_sinks));
  }
  CUFLASH_DEVICE uint32_t forced_bits(int start) const {
    return bits_of_run(start, 0, num_sinks) | bits_of_run(start, first_forced, stop_forced);
  }

 private:
  CUFLASH_DEVICE int within(int64_t column) const {
    return column < 0 ? 0 : column < num_columns ? static_cast<int>(column) : num_columns;
  }
};

// Return the sum, and below the lesser and the greater, of the numbers of the two lanes of a row.
CUFLASH_DEVICE int sum_of_pair(int x) { return x + __shfl_xor_sync(0xffffffffu, x, kRowsOfLanes); }
CUFLASH_DEVICE uint32_t least_of_pair(uint32_t x) {
  const uint32_t other = __shfl_xor_sync(0xffffffffu, x, kRowsOfLanes);
  return x < other ? x : other;
}
CUFLASH_DEVICE uint32_t greatest_of_pair(uint32_t x) {
  const uint32_t other = __shfl_xor_sync(0xffffffffu, x, kRowsOfLanes);
  return x > other ? x : other;
}

// Write the lists of the first `choice.count` blocks of rows, and of all that are forced. `scores` are those of the row
// of a lane, of which the first `num_scores` are set; others are 0. They are replaced. Called by whole warps.
CUFLASH_DEVICE void list_by_lanes(const BlocksOfRow& row, bool has_row, float* scores, int num_scores) {
  const Choice& choice = row.choice;
  const ColumnsOfRow columns(row, has_row);
  const int half = ptx::lane() / kRowsOfLanes, num_columns = columns.num_columns;
  uint32_t* const places = reinterpret_cast<uint32_t*>(scores);
  // Call `visit(start)` for the runs of a lane.
  const auto each_run = [&](auto visit) {
    for (int start = kRun * half; start < num_columns; start += 2 * kRun) visit(start);
  };
  int num_free = 0;
  uint32_t least = kNotEligiblePlace, greatest = 0;
  each_run([&](int start) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int column = start + i;
      const bool is_free = columns.is_free(column);
      const uint32_t place = place_of(is_free && column < num_scores ? scores[column] : 0.0f);
      places[column] = is_free ? place : kNotEligiblePlace;
      if (!is_free) continue;
      ++num_free;
      least = place < least ? place : least;
      greatest = place > greatest ? place : greatest;
    }
  });
  num_free = sum_of_pair(num_free);
  least = least_of_pair(least);
  greatest = greatest_of_pair(greatest);
  // Places before `end` are chosen, and the first `missing` columns of the place `end` if there are any.
  const int wanted = choice.count - columns.num_forced();
  uint32_t end = wanted > 0 ? greatest + 1 : 0;
  int missing = 0;
  bool is_searched = wanted > 0 && num_free > wanted;  // then places before `least` are fewer than wanted
  while (__any_sync(0xffffffffu, is_searched)) {
    const bool is_last = end - least <= 1;
    const uint32_t middle = is_last ? least : place_between(least, end);
    int before = 0;
    each_run([&](int start) {
#pragma unroll
      for (int i = 0; i < kRun; ++i) before += places[start + i] < middle;
    });
    before = sum_of_pair(before);
    if (!is_searched) continue;
    if (is_last) {
      end = least;
      missing = wanted - before;
    } else if (before < wanted) {
      least = middle;
    } else {
      end = middle;
    }
    is_searched = !is_last && before != wanted;
  }
  int32_t* const list = reinterpret_cast<int32_t*>(choice.kept) +
                        static_cast<int64_t>(row.number) * choice.list_length;
  int length = 0;
  for (int start = kRun * half; __any_sync(0xffffffffu, start < num_columns); start += 2 * kRun) {
    uint32_t bits = columns.forced_bits(start), ties = 0;
    if (start < num_columns) {
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const uint32_t place = places[start + i];
        bits |= static_cast<uint32_t>(place < end) << i;
        ties |= static_cast<uint32_t>(missing > 0 && place == end) << i;
      }
    }
    if (__any_sync(0xffffffffu, ties != 0)) {
      const int num_ties = __popc(ties), other = __shfl_xor_sync(0xffffffffu, num_ties, kRowsOfLanes);
      int own = missing - (half == 0 ? 0 : other);  // ties that the lane may take
      missing -= min(missing, num_ties + other);
      for (; ties != 0 && own > 0; ties &= ties - 1, --own) bits |= ties & (0u - ties);
    }
    const int count = __popc(bits), other = __shfl_xor_sync(0xffffffffu, count, kRowsOfLanes);
    for (int at = length + (half == 0 ? 0 : other); bits != 0; bits &= bits - 1, ++at)
      if (at < choice.list_length) list[at] = start + __ffs(bits) - 1;
    length += count + other;
  }
  if (!has_row) return;
  for (int at = length + half; at < choice.list_length; at += 2) list[at] = -1;
}

}  // namespace cuflash::lists
