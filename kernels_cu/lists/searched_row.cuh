#pragma once
#include <lists/place_search.cuh>

// Chooses blocks of a row by a thread block. It makes the choice of `choose_of_row` for rules that have only a number
// of blocks. The places of the row are in shared memory. In each step of the search, every warp counts the blocks before
// another place, so that a few steps are enough. Loops are not unrolled: fetching instructions that run once can take
// longer than running them.
namespace cuflash::lists {

constexpr int kRowWarps = Config::kNumWarps;
constexpr int kStepWords = 2 * kRowWarps;  // of a step of the search: each warp's place, and the number before it
constexpr int kSearchWords = 3 * kStepWords;  // of two steps, and of the warps' numbers of blocks and of ties

// The places of a row in shared memory, as a warp reads them.
struct SearchedPlaces {
  const uint32_t* places;
  int num_columns;

  CUFLASH_DEVICE int count_before(uint32_t end) const {
    int count = 0;
#pragma unroll 4
    for (int column = ptx::lane(); column < num_columns; column += 32) count += places[column] < end;
    return sum_of_warp(count);
  }
  // Return the lanes whose places, from a column on, are in a condition.
  template <class IsMet>
  CUFLASH_DEVICE uint32_t lanes_with(int start, int stop, IsMet is_met) const {
    const int column = start + ptx::lane();
    return __ballot_sync(0xffffffffu, column < stop && is_met(places[column]));
  }
};

// Write the list of the first `choice.count` blocks of a row, and of all that are forced. `room` is shared memory of
// kSearchWords words and a word for each column. Called by all threads.
template <class Row>
CUFLASH_DEVICE void list_by_block(const Row& row, uint32_t* room) {
  const Choice& choice = row.choice;
  const int warp = ptx::thread_index() / 32, lane = ptx::lane(), num_columns = row.num_columns;
  uint32_t* const storage = room + kSearchWords;
  const SearchedPlaces places{storage, num_columns};
  // Of the blocks that are neither forced nor without eligibility.
  uint32_t least = kNotEligiblePlace, greatest = 0;
#pragma unroll 1
  for (int column = ptx::thread_index(); column < num_columns; column += 32 * kRowWarps) {
    const uint32_t place = row.new_place(column);
    storage[column] = place;
    if (place == kForcedPlace || place == kNotEligiblePlace) continue;
    least = place < least ? place : least;
    greatest = place > greatest ? place : greatest;
  }
#pragma unroll 1
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t low = __shfl_xor_sync(0xffffffffu, least, offset);
    const uint32_t high = __shfl_xor_sync(0xffffffffu, greatest, offset);
    least = low < least ? low : least;
    greatest = high > greatest ? high : greatest;
  }
  // Store two numbers of each warp, and call `visit(first, second)` for those of all warps.
  const auto exchange = [&](int step, uint32_t first, uint32_t second, auto visit) {
    uint32_t* const words = room + step * kStepWords;
    if (lane == 0) {
      words[2 * warp] = first;
      words[2 * warp + 1] = second;
    }
    __syncthreads();  // all warps have stored; a step of equal number is two barriers away
#pragma unroll
    for (int other = 0; other < kRowWarps; ++other) visit(other, words[2 * other], words[2 * other + 1]);
  };
  exchange(0, least, greatest, [&](int, uint32_t low, uint32_t high) {
    least = low < least ? low : least;
    greatest = high > greatest ? high : greatest;
  });
  uint32_t end = greatest + 1;  // places before it are chosen, and some blocks of place `tied`
  uint32_t tied = kNotEligiblePlace;
  int missing = 0;
  // There are more than `count` blocks before `end`, and before `least` fewer, or only forced ones.
  bool is_searched = least != kNotEligiblePlace && places.count_before(end) > choice.count;
#pragma unroll 1
  for (int step = 1; is_searched; step ^= 1) {
    if (end - least == 1) {
      end = tied = least;
      missing = max(0, choice.count - places.count_before(least));
      break;
    }
    const uint32_t own = place_between(least, end, static_cast<float>(warp + 1) / (kRowWarps + 1));
    exchange(step, own, places.count_before(own), [&](int, uint32_t place, uint32_t before) {
      if (static_cast<int>(before) < choice.count) {
        least = place > least ? place : least;
      } else {
        end = place < end ? place : end;
        is_searched &= static_cast<int>(before) != choice.count;
      }
    });
  }
  // Each warp lists a run of columns.
  const int of_warp = (num_columns + 32 * kRowWarps - 1) / (32 * kRowWarps) * 32;
  const int first = min(warp * of_warp, num_columns), stop = min(first + of_warp, num_columns);
  const auto is_before = [&](uint32_t place) { return place < end; };
  const auto is_tie = [&](uint32_t place) { return missing > 0 && place == tied; };
  int num_before = 0, num_ties = 0, length = 0, ties_before = 0;
#pragma unroll 1
  for (int start = first; start < stop; start += 32) {
    num_before += __popc(places.lanes_with(start, stop, is_before));
    num_ties += __popc(places.lanes_with(start, stop, is_tie));
  }
  exchange(2, num_before, num_ties, [&](int other, uint32_t before, uint32_t ties) {
    if (other >= warp) return;
    length += before;
    ties_before += ties;
  });
  ties_before = min(ties_before, missing);
  length += ties_before;
  missing -= ties_before;
  int32_t* const list = reinterpret_cast<int32_t*>(choice.kept) + static_cast<int64_t>(row.number) * choice.list_length;
  const uint32_t lanes_before = (1u << lane) - 1;
#pragma unroll 1
  for (int start = first; start < stop; start += 32) {
    const uint32_t ties = places.lanes_with(start, stop, is_tie);
    const bool is_taken = (ties >> lane & 1) != 0 && __popc(ties & lanes_before) < missing;
    const uint32_t bits = places.lanes_with(start, stop, is_before) | __ballot_sync(0xffffffffu, is_taken);
    missing -= min(missing, __popc(ties));
    const int at = length + __popc(bits & lanes_before);
    if ((bits >> lane & 1) != 0 && at < choice.list_length) list[at] = start + lane;
    length += __popc(bits);
  }
  if (warp == kRowWarps - 1)  // its run is the last one, even without columns
    for (int at = length + lane; at < choice.list_length; at += 32) list[at] = -1;
}

}  // namespace cuflash::lists
