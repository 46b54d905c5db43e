// The order in which blocks that finish dQ take tiles, and counters with which one warp signals another.
#include <attention/tile_scheduler.cuh>
using namespace cuflash;
using namespace cuflash::attention;

extern "C" __global__ void turns(int* tiles, int places, int num_tiles, int num_groups, int ahead, int behind) {
  const FusedDqTileOrder order{places, num_tiles, num_groups, ahead, behind};
  for (int number = threadIdx.x; number < places * num_tiles * num_groups; number += blockDim.x) {
    const TileOrder at = order.at(number);
    tiles[2 * number] = at.batch_head_number;
    tiles[2 * number + 1] = at.rank;
  }
}

extern "C" __global__ void counts(int* stored, int* done, int* seen) {
  if (threadIdx.x < 32) {
    tile::wait_bulk_copies();
    tile::signal(stored, 5);
    tile::signal(stored, 0);
    tile::signal(stored, 8);
    tile::signal(done, 3);
  }
  __syncthreads();
  if (threadIdx.x < 32) return;
  tile::wait_for_bits(stored, 9);
  tile::wait_at_least(done, 2);
  seen[threadIdx.x - 32] = 2;
}
