#pragma once
#include <lists/row_choice.cuh>

// Chooses blocks of rows with few columns, whose places the threads of a row, a warp or a thread block, keep in
// registers. It makes the choice of `choose_of_row` for rules that have only a number of blocks.
namespace cuflash::lists {

constexpr int kMostRegisters = 16;  // places of a lane
constexpr int kFewColumns = 32 * kMostRegisters;  // of a warp

// A thread block that keeps the places of a row.
struct FewOfBlock {
  static constexpr int kNumWarps = Config::kNumWarps;
  static constexpr int kBytes = sizeof(uint32_t) * kNumWarps;

  uint32_t* of_warps;  // kBytes of shared memory

  CUFLASH_DEVICE int warp() const { return ptx::thread_index() / 32; }
  CUFLASH_DEVICE int sum(int x) const {
    return static_cast<int>(reduced(x, [](uint32_t one, uint32_t other) { return one + other; }));
  }
  CUFLASH_DEVICE uint32_t least(uint32_t x) const {
    return reduced(x, [](uint32_t one, uint32_t other) { return one < other ? one : other; });
  }
  CUFLASH_DEVICE uint32_t greatest(uint32_t x) const {
    return reduced(x, [](uint32_t one, uint32_t other) { return one > other ? one : other; });
  }
  // Return the sum over the warps before that of the thread, of numbers that are equal in all lanes.
  CUFLASH_DEVICE int sum_before(int x) const {
    if (ptx::lane() == 0) of_warps[warp()] = x;
    __syncthreads();  // all warps have written
    int sum = 0;
    for (int other = 0; other < warp(); ++other) sum += of_warps[other];
    __syncthreads();  // all warps have read
    return sum;
  }

 private:
  template <class Combine>
  CUFLASH_DEVICE uint32_t reduced(uint32_t x, Combine combine) const {
    for (int offset = 1; offset < 32; offset *= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, offset));
    if (ptx::lane() == 0) of_warps[warp()] = x;
    __syncthreads();  // all warps have written
    for (int other = 0; other < kNumWarps; ++other)
      if (other != warp()) x = combine(x, of_warps[other]);
    __syncthreads();  // all warps have read
    return x;
  }
};

// Return the score, negated, of a place that is neither forced nor without eligibility.
CUFLASH_DEVICE float negated_score(uint32_t place) {
  const int32_t bits = static_cast<int32_t>(place ^ 0x80000000u);
  return __uint_as_float(static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7fffffff)));
}

// Return a place between two others: that of the mean of their scores if there is one, else the mean of the places.
CUFLASH_DEVICE uint32_t place_between(uint32_t least, uint32_t end) {
  const float mean = 0.5f * negated_score(least) + 0.5f * negated_score(end);
  const int32_t bits = static_cast<int32_t>(__float_as_uint(mean + 0.0f));
  const uint32_t place = static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
  return mean == mean && least < place && place < end ? place : least + (end - least) / 2;
}

// The places of a row in registers. The columns are divided into runs of equal lengths, one for each warp, and lane l
// has those of columns l, l + 32, ... of its run.
template <class Few>
struct PlacesOfRow {
  static constexpr int kMostColumns = kFewColumns * Few::kNumWarps;

  const Few few;
  uint32_t at[kMostRegisters];
  int first, num_columns;  // of the warp's run

  template <class Row>
  CUFLASH_DEVICE PlacesOfRow(const Row& row, Few of_row) : few(of_row) {
    const int of_warp = (row.num_columns + 32 * Few::kNumWarps - 1) / (32 * Few::kNumWarps) * 32;
    first = few.warp() * of_warp;
    num_columns = max(0, min(of_warp, row.num_columns - first));
    each([&](int i, int column) {
      at[i] = column < first + num_columns ? row.new_place(column) : kNotEligiblePlace;
    });
  }

  // Call `visit(i, column)` for the places of a lane.
  template <class Visit>
  CUFLASH_DEVICE void each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kMostRegisters; ++i)
      if (32 * i < num_columns) visit(i, first + 32 * i + ptx::lane());
  }

  CUFLASH_DEVICE int count_before(uint32_t end) const {
    int count = 0;
    each([&](int i, int) { count += at[i] < end; });
    return few.sum(count);
  }
};

// Write the list of the first `choice.count` blocks of a row, and of all that are forced. Called by all its threads.
template <class Row, class Few>
CUFLASH_DEVICE void list_few(const Row& row, Few few) {
  const Choice& choice = row.choice;
  const PlacesOfRow<Few> places(row, few);
  int32_t* const list = reinterpret_cast<int32_t*>(choice.kept) +
                        row.first / choice.num_kv_blocks * choice.list_length;
  uint32_t least = kNotEligiblePlace, greatest = 0;  // of the blocks that are neither forced nor without eligibility
  places.each([&](int i, int) {
    const uint32_t place = places.at[i];
    if (place == kForcedPlace || place == kNotEligiblePlace) return;
    least = place < least ? place : least;
    greatest = place > greatest ? place : greatest;
  });
  least = few.least(least);
  greatest = few.greatest(greatest);
  uint32_t end = greatest + 1;  // places before it are chosen, and some blocks of place `tied`
  uint32_t tied = kNotEligiblePlace;
  int missing = 0;
  if (least != kNotEligiblePlace && places.count_before(end) > choice.count) {
    // There are more than `count` blocks before `end`, and only forced ones before `least`.
    while (true) {
      if (end - least == 1) {
        end = tied = least;
        missing = choice.count - places.count_before(least);
        break;
      }
      const uint32_t middle = place_between(least, end);
      const int before = places.count_before(middle);
      if (before < choice.count) {
        least = middle;
        continue;
      }
      end = middle;
      if (before == choice.count) break;
    }
  }
  int length = 0;
  if constexpr (Few::kNumWarps > 1) {
    int num_before = 0, num_ties = 0;
    places.each([&](int i, int) {
      num_before += __popc(__ballot_sync(0xffffffffu, places.at[i] < end));
      num_ties += __popc(__ballot_sync(0xffffffffu, missing > 0 && places.at[i] == tied));
    });
    const int ties_before = min(few.sum_before(num_ties), max(missing, 0));
    length = few.sum_before(num_before) + ties_before;
    missing -= ties_before;
  }
  places.each([&](int i, int column) {
    const uint32_t lanes_before = (1u << ptx::lane()) - 1;
    const uint32_t ties = __ballot_sync(0xffffffffu, missing > 0 && places.at[i] == tied);
    const bool is_taken = (ties >> ptx::lane() & 1) != 0 && __popc(ties & lanes_before) < missing;
    missing -= __popc(ties) < missing ? __popc(ties) : missing;
    const bool is_kept = places.at[i] < end || is_taken;
    const uint32_t bits = __ballot_sync(0xffffffffu, is_kept);
    const int place = length + __popc(bits & lanes_before);
    if (is_kept && place < choice.list_length) list[place] = column;
    length += __popc(bits);
  });
  if (few.warp() == Few::kNumWarps - 1)  // its run is the last one, even without columns
    for (int place = length + ptx::lane(); place < choice.list_length; place += 32) list[place] = -1;
}

}  // namespace cuflash::lists
