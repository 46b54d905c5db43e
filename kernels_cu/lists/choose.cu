// Chooses blocks of each row of a grid, one warp for each row: those of the highest scores, the lower number among
// equal scores, as many as a budget allows; forced blocks come first. Every block has a place in the order, a number
// that is lower the sooner the block is taken. The last place that is taken is found by bisection, which counts the
// blocks before a place, or adds up their shares. cuflash/selectors/budget.py is the specification.
#include <lists/selection.cuh>
#include <ptx/math.cuh>
#include <ptx/shared.cuh>

namespace cuflash::lists {

using config::Accumulator;

constexpr uint32_t kForcedPlace = 0, kNotEligiblePlace = ~0u;

CUFLASH_DEVICE int64_t floor_divided(int64_t x, int64_t by) { return x >= 0 ? x / by : -((by - 1 - x) / by); }

CUFLASH_DEVICE int sum_of_warp(int x) {
  for (int lane_offset = 1; lane_offset < 32; lane_offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, lane_offset);
  return x;
}
CUFLASH_DEVICE double sum_of_warp(double x) {
  for (int lane_offset = 1; lane_offset < 32; lane_offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, lane_offset);
  return x;
}

// The end of the chosen blocks: all blocks of places before one, and of this place the blocks up to a column.
struct End {
  uint32_t place;
  int column;

  CUFLASH_DEVICE bool is_before(const End& other) const {
    return place != other.place ? place < other.place : column < other.column;
  }
};

// A row of the grid.
struct Row {
  const Choice& choice;
  int64_t first;  // cell
  uint32_t* places = nullptr;  // the places of the row's blocks, if they are stored
  int64_t diagonal_first, diagonal_last;

  CUFLASH_DEVICE Row(const Choice& of, int row) : choice(of), first(static_cast<int64_t>(row) * of.num_kv_blocks) {
    const int64_t start = static_cast<int64_t>(row % of.num_q_blocks) * of.block_q, stop = start + of.block_q;
    diagonal_first = floor_divided(start + of.offset, of.block_kv);
    diagonal_last = floor_divided((stop < of.seqlen_q ? stop : of.seqlen_q) + of.offset - 1, of.block_kv);
  }

  CUFLASH_DEVICE bool is_eligible(int column) const {
    return (!choice.is_causal || column <= diagonal_last) && (choice.allowed == nullptr || choice.allowed[first + column]);
  }

  CUFLASH_DEVICE bool is_forced(int column) const {
    if (column <= diagonal_last) {
      const int64_t start = diagonal_last - (choice.num_local - 1);
      if (column >= start || (choice.has_diagonal && column >= diagonal_first)) return true;
    }
    return column < choice.num_sinks || (choice.forced != nullptr && choice.forced[first + column]);
  }

  CUFLASH_DEVICE Accumulator score(int column) const {
    return static_cast<const Accumulator*>(choice.scores)[first + column];
  }

  CUFLASH_DEVICE uint32_t place(int column) const { return places == nullptr ? new_place(column) : places[column]; }

  // Store the places of all blocks in shared memory. Called by a warp.
  CUFLASH_DEVICE void keep_places(uint32_t* room) {
    for (int column = ptx::lane(); column < choice.num_kv_blocks; column += 32) room[column] = new_place(column);
    __syncwarp();
    places = room;
  }

  // Return the order of a score as a float: -0 is 0, and NaN is the least.
  CUFLASH_DEVICE uint32_t new_place(int column) const {
    if (!is_eligible(column)) return kNotEligiblePlace;
    if (is_forced(column)) return kForcedPlace;
    const float as_float = static_cast<float>(score(column));
    const float negated = 0.0f - (as_float != as_float ? ptx::negative_infinity<float>() : as_float);
    const int32_t bits = static_cast<int32_t>(__float_as_uint(negated));
    return static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
  }

  CUFLASH_DEVICE double share(int column) const {
    return choice.shares == nullptr ? 1.0 : static_cast<double>(static_cast<const Accumulator*>(choice.shares)[first + column]);
  }

  // Return the number of blocks, or the sum of shares, whose places are before one. Called by a warp.
  CUFLASH_DEVICE int count_before(uint32_t place_of_end) const {
    int count = 0;
    for (int column = ptx::lane(); column < choice.num_kv_blocks; column += 32) count += place(column) < place_of_end;
    return sum_of_warp(count);
  }
  CUFLASH_DEVICE double shares_before(uint32_t place_of_end) const {
    double sum = 0;
    for (int column = ptx::lane(); column < choice.num_kv_blocks; column += 32)
      sum += place(column) < place_of_end ? share(column) : 0.0;
    return sum_of_warp(sum);
  }

  // Return the greatest place for which `is_taken` holds. It holds for 0, and for no place after one for which it does
  // not.
  template <class IsTaken>
  static CUFLASH_DEVICE uint32_t last_place(IsTaken is_taken) {
    uint32_t found = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit /= 2)
      if (is_taken(found | bit)) found |= bit;
    return found;
  }

  // Choose a number of first blocks.
  CUFLASH_DEVICE End end_of_count(int count) const {
    const uint32_t last = last_place([&](uint32_t at) { return count_before(at) < count; });
    int missing = count - count_before(last), end = -1;
    for (int start = 0; start < choice.num_kv_blocks && missing > 0; start += 32) {
      const int column = start + ptx::lane();
      uint32_t equal = __ballot_sync(0xffffffffu, column < choice.num_kv_blocks && place(column) == last);
      for (; equal != 0 && missing > 0; equal &= equal - 1, --missing) end = start + __ffs(equal) - 1;
    }
    return {last, end};
  }

  // Choose the fewest first blocks whose shares add up to a part of all shares; all blocks if a share is NaN.
  CUFLASH_DEVICE End end_of_mass(double mass) const {
    const double needed = mass * shares_before(kNotEligiblePlace);
    const uint32_t last = last_place([&](uint32_t at) { return !(shares_before(at) >= needed); });
    double sum = shares_before(last);
    int end = -1;
    for (int start = 0; start < choice.num_kv_blocks && !(sum >= needed); start += 32) {
      const int column = start + ptx::lane();
      uint32_t equal = __ballot_sync(0xffffffffu, column < choice.num_kv_blocks && place(column) == last);
      for (; equal != 0 && !(sum >= needed); equal &= equal - 1) {
        end = start + __ffs(equal) - 1;
        sum += share(end);
      }
    }
    return {last, end};
  }
};

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::config::kNumWarps)
lists_choose(const __grid_constant__ cuflash::lists::Choice choice) {
  using namespace cuflash;
  using namespace cuflash::lists;
  const int number = blockIdx.x * config::kNumWarps + ptx::thread_index() / 32;
  if (number >= choice.num_rows) return;
  Row row(choice, number);
  if (choice.keeps_places)
    row.keep_places(ptx::dynamic_shared<uint32_t>() + ptx::thread_index() / 32 * choice.num_kv_blocks);
  End end{kForcedPlace, choice.num_kv_blocks};
  if (choice.count > 0) {
    const End of_count = row.end_of_count(choice.count);
    if (end.is_before(of_count)) end = of_count;
  }
  if (choice.mass > 0) {
    const End of_mass = row.end_of_mass(choice.mass);
    if (end.is_before(of_mass)) end = of_mass;
  }
  for (int column = ptx::lane(); column < choice.num_kv_blocks; column += 32) {
    const uint32_t place = row.place(column);
    bool is_kept = place != kNotEligiblePlace && !end.is_before(End{place, column});
    if (choice.has_threshold && place != kNotEligiblePlace)
      is_kept |= row.score(column) >= static_cast<Accumulator>(choice.threshold);
    choice.kept[row.first + column] = is_kept;
  }
}
