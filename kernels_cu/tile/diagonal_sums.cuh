#pragma once
#include <ptx/thread.cuh>

// Sums along the diagonals of a warp's tile of 16 rows and 16 columns, in the layout of an accumulator.
namespace cuflash::tile {

// A thread's sums. Its elements in two 8 x 8 blocks on the same diagonal of blocks, and in columns that are both even
// or both odd, are on the same diagonal.
template <class T>
struct DiagonalSums {
  T parts[3][2] = {};  // by the row minus the column of the 8 x 8 block, from -1 to 1, and by the column's last bit

  // Return the sum to which the element at a thread's row and column is added.
  CUFLASH_DEVICE T& at(int i, int j) { return parts[i - j / 2 + 1][j % 2]; }

  // Return the row minus the column of the diagonal whose sum `of_lane` returns: one of -16 to 15.
  static CUFLASH_DEVICE int distance() {
    const int pair = ptx::lane() % 4;
    return 8 * (pair % 2 * 2 + pair / 2) + first() % 8 - 16;
  }

  // Return the sum of a diagonal of the warp's tile; each lane has another one. Called by whole warps.
  CUFLASH_DEVICE T of_lane() const {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = ptx::lane(), row = lane / 4, pair = lane % 4;
    // Diagonals whose distances differ by multiples of 8 are in the same lanes. Add those in odd columns, which the
    // lane with the next row has.
    T sums[4], halves[2];
#pragma unroll
    for (int x = 0; x < 4; ++x)
      sums[x] = part(x, 0) + __shfl_sync(kAll, part(x, 1), (lane + 4) % 32);
    // Add the sums of the four lanes that have the same diagonals; each keeps one of the four.
    const auto lane_of = [&](int other) { return (row + 2 * (other - pair) + 8) % 8 * 4 + other; };
    const bool keeps_upper = pair % 2, keeps_second = pair / 2;
#pragma unroll
    for (int x = 0; x < 2; ++x)
      halves[x] = (keeps_upper ? sums[x + 2] : sums[x]) +
          __shfl_sync(kAll, keeps_upper ? sums[x] : sums[x + 2], lane_of(pair ^ 1));
    return (keeps_second ? halves[1] : halves[0]) +
        __shfl_sync(kAll, keeps_second ? halves[0] : halves[1], lane_of(pair ^ 2));
  }

 private:
  // Return the row minus the column of the thread's first element in the lowest of its 8 x 8 blocks, plus 16.
  static CUFLASH_DEVICE int first() { return ptx::lane() / 4 - 2 * (ptx::lane() % 4) + 8; }

  // Return the part on the lane's diagonal number x, or 0 if the thread has no elements there.
  CUFLASH_DEVICE T part(int x, int parity) const {
    const T upper = x < 3 ? parts[min(x, 2)][parity] : T(0), lower = x > 0 ? parts[max(x - 1, 0)][parity] : T(0);
    return first() - parity < 8 ? upper : lower;
  }
};

}  // namespace cuflash::tile
