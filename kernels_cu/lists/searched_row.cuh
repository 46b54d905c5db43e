#pragma once
#include <lists/place_search.cuh>

// Chooses blocks of a row by a thread block. It makes the choice of `choose_of_row` for rules that have only a number
// of blocks. The places of the row are in shared memory. In each step of the search, every warp counts the blocks
// before another place, so that a few steps are enough. Loops are not unrolled: fetching instructions that run once can
// take longer than running them.
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

// Store two numbers of each warp in shared memory, and call `visit(warp, first, second)` for those of all warps. Words
// may be used again two barriers later. Called by all threads.
template <class Visit>
CUFLASH_DEVICE void exchange(uint32_t* words, uint32_t first, uint32_t second, Visit visit) {
  if (ptx::lane() == 0) {
    words[2 * (ptx::thread_index() / 32)] = first;
    words[2 * (ptx::thread_index() / 32) + 1] = second;
  }
  __syncthreads();  // all warps have stored
#pragma unroll
  for (int warp = 0; warp < kRowWarps; ++warp) visit(warp, words[2 * warp], words[2 * warp + 1]);
}

// The blocks that are chosen: all with places before `end`, and the first `missing` ones of the place `tied`.
struct ChosenPlaces {
  uint32_t end, tied;
  int missing;
};

// Find the places of the first `count` blocks, and of all that are forced; the places of the others are from least to
// greatest. Called by all threads.
CUFLASH_DEVICE ChosenPlaces search_places(const SearchedPlaces& places, int count, uint32_t least, uint32_t greatest,
                                          uint32_t* room) {
  uint32_t end = greatest + 1;
  // There are more than `count` blocks before `end`, and before `least` fewer, or only forced ones.
  bool is_searched = least != kNotEligiblePlace && places.count_before(end) > count;
#pragma unroll 1
  for (int step = 1; is_searched; step ^= 1) {
    if (end - least == 1) return {least, least, max(0, count - places.count_before(least))};
    const float part = static_cast<float>(ptx::thread_index() / 32 + 1) / (kRowWarps + 1);
    const uint32_t own = place_between(least, end, part);
    exchange(room + step * kStepWords, own, places.count_before(own), [&](int, uint32_t place, uint32_t before) {
      if (static_cast<int>(before) < count) {
        least = place > least ? place : least;
      } else {
        end = place < end ? place : end;
        is_searched &= static_cast<int>(before) != count;
      }
    });
  }
  return {end, kNotEligiblePlace, 0};
}

// Write the columns of the chosen blocks, ascending, as a list; -1 fills the rest. Each warp lists a run of columns.
// Called by all threads.
CUFLASH_DEVICE void write_runs(const SearchedPlaces& places, ChosenPlaces chosen, int32_t* list, int list_length,
                               uint32_t* words) {
  const int warp = ptx::thread_index() / 32, lane = ptx::lane(), num_columns = places.num_columns;
  const int of_warp = (num_columns + 32 * kRowWarps - 1) / (32 * kRowWarps) * 32;
  const int first = min(warp * of_warp, num_columns), stop = min(first + of_warp, num_columns);
  const auto is_before = [&](uint32_t place) { return place < chosen.end; };
  const auto is_tie = [&](uint32_t place) { return chosen.missing > 0 && place == chosen.tied; };
  int num_before = 0, num_ties = 0, length = 0, ties_before = 0;
#pragma unroll 1
  for (int start = first; start < stop; start += 32) {
    num_before += __popc(places.lanes_with(start, stop, is_before));
    num_ties += __popc(places.lanes_with(start, stop, is_tie));
  }
  exchange(words, num_before, num_ties, [&](int other, uint32_t before, uint32_t ties) {
    if (other >= warp) return;
    length += before;
    ties_before += ties;
  });
  ties_before = min(ties_before, chosen.missing);
  length += ties_before;
  chosen.missing -= ties_before;
  const uint32_t lanes_before = (1u << lane) - 1;
#pragma unroll 1
  for (int start = first; start < stop; start += 32) {
    const uint32_t ties = places.lanes_with(start, stop, is_tie);
    const bool is_taken = (ties >> lane & 1) != 0 && __popc(ties & lanes_before) < chosen.missing;
    const uint32_t bits = places.lanes_with(start, stop, is_before) | __ballot_sync(0xffffffffu, is_taken);
    chosen.missing -= min(chosen.missing, __popc(ties));
    const int at = length + __popc(bits & lanes_before);
    if ((bits >> lane & 1) != 0 && at < list_length) list[at] = start + lane;
    length += __popc(bits);
  }
  if (warp == kRowWarps - 1)  // its run is the last one, even without columns
    for (int at = length + lane; at < list_length; at += 32) list[at] = -1;
}

// Write the list of the first `choice.count` blocks of a row, and of all that are forced. `room` is shared memory of
// kSearchWords words and a word for each column. Called by all threads.
template <class Row>
CUFLASH_DEVICE void list_by_block(const Row& row, uint32_t* room) {
  const Choice& choice = row.choice;
  uint32_t* const storage = room + kSearchWords;
  // The least and the greatest score of the eligible blocks that are not forced.
  uint32_t least = kNotEligiblePlace, greatest = 0;
#pragma unroll 1
  for (int column = ptx::thread_index(); column < row.num_columns; column += 32 * kRowWarps) {
    const uint32_t place = row.new_place(column);
    storage[column] = place;
    if (place == kForcedPlace || place == kNotEligiblePlace) continue;
    least = place < least ? place : least;
    greatest = place > greatest ? place : greatest;
  }
  const auto widen = [&](uint32_t low, uint32_t high) {
    least = low < least ? low : least;
    greatest = high > greatest ? high : greatest;
  };
#pragma unroll 1
  for (int offset = 1; offset < 32; offset *= 2)
    widen(__shfl_xor_sync(0xffffffffu, least, offset), __shfl_xor_sync(0xffffffffu, greatest, offset));
  exchange(room, least, greatest, [&](int, uint32_t low, uint32_t high) { widen(low, high); });
  const SearchedPlaces places{storage, row.num_columns};
  const ChosenPlaces chosen = search_places(places, choice.count, least, greatest, room);
  int32_t* const lists = reinterpret_cast<int32_t*>(choice.kept);
  write_runs(places, chosen, lists + static_cast<int64_t>(row.number) * choice.list_length, choice.list_length,
             room + 2 * kStepWords);
}

}  // namespace cuflash::lists
