// The order in which blocks take tiles where they finish dQ, and counts by which one warp tells another.
#include <attention/work_tile.cuh>
using namespace cuflash;
using namespace cuflash::attention;

extern "C" __global__ void turns(int* tiles, int places, int num_tiles, int num_groups, int ahead, int behind) {
  const FinishingTurns order{places, num_tiles, num_groups, ahead, behind};
  for (int number = threadIdx.x; number < places * num_tiles * num_groups; number += blockDim.x) {
    const Turns at = order.at(number);
    tiles[2 * number] = at.place;
    tiles[2 * number + 1] = at.turn;
  }
}

extern "C" __global__ void counts(int* stored, int* done, int* seen) {
  if (threadIdx.x < 32) {
    tile::await_copies();
    tile::tell(stored, 5);
    tile::tell(stored, 0);
    tile::tell(stored, 8);
    tile::tell(done, 3);
  }
  __syncthreads();
  if (threadIdx.x < 32) return;
  tile::await_bits(stored, 9);
  tile::await_count(done, 2);
  seen[threadIdx.x - 32] = 2;
}
