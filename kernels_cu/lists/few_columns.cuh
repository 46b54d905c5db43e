#pragma once
#include <lists/place_search.cuh>

// Chooses blocks of rows with few columns, whose places a warp keeps in registers. It makes the choice of
// `choose_of_row` for rules that have only a number of blocks.
namespace cuflash::lists {

constexpr int kMostRegisters = 16;  // places of a lane
constexpr int kFewColumns = 32 * kMostRegisters;

// The places of a row in the registers of a warp: lane l has those of columns l, l + 32, ...
struct PlacesOfRow {
  uint32_t at[kMostRegisters];
  int num_columns;

  template <class Row>
  CUFLASH_DEVICE explicit PlacesOfRow(const Row& row) : num_columns(row.num_columns) {
    each([&](int i, int column) { at[i] = column < num_columns ? row.new_place(column) : kNotEligiblePlace; });
  }

  // Call `visit(i, column)` for each of a lane's places.
  template <class Visit>
  CUFLASH_DEVICE void each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kMostRegisters; ++i)
      if (32 * i < num_columns) visit(i, 32 * i + ptx::lane());
  }

  CUFLASH_DEVICE int count_before(uint32_t end) const {
    int count = 0;
    each([&](int i, int) { count += at[i] < end; });
    return __reduce_add_sync(0xffffffffu, count);
  }
};

// Write the list of the first `choice.count` blocks of a row, and of all that are forced. Called by a warp.
template <class Row>
CUFLASH_DEVICE void list_few(const Row& row) {
  const Choice& choice = row.choice;
  const PlacesOfRow places(row);
  int32_t* const list = reinterpret_cast<int32_t*>(choice.kept) +
                        static_cast<int64_t>(row.number) * choice.list_length;
  uint32_t least = kNotEligiblePlace, greatest = 0;  // of the blocks that are neither forced nor without eligibility
  places.each([&](int i, int) {
    const uint32_t place = places.at[i];
    if (place == kForcedPlace || place == kNotEligiblePlace) return;
    least = place < least ? place : least;
    greatest = place > greatest ? place : greatest;
  });
  least = __reduce_min_sync(0xffffffffu, least);
  greatest = __reduce_max_sync(0xffffffffu, greatest);
  uint32_t end = greatest + 1;  // places before it are chosen, and some blocks of place `tied`
  uint32_t tied = kNotEligiblePlace;
  int missing = 0;
  if (least != kNotEligiblePlace && places.count_before(end) > choice.count) {
    // There are more than `count` blocks before `end`, and only forced blocks before `least`.
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
  for (int place = length + ptx::lane(); place < choice.list_length; place += 32) list[place] = -1;
}

}  // namespace cuflash::lists
