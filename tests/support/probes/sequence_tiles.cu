// Cuts the queries of a matrix into tiles, one block of positions after another. `probe` defines the sizes.
#include <sm90/sequence_tiles.cuh>
using namespace cuflash;
using namespace cuflash::attention;
using namespace cuflash::sm90;

// Writes the first query and the end of each tile, and the number of tiles of each block of positions.
extern "C" __global__ void sequence_tiles(const __grid_constant__ Params params, int* tiles, int* counts) {
  WorkTile block{};
  int number = 0;
  for (int first = 0; first < params.shape.seqlen_q; first += probe::kHeight) {
    block.first = first;
    block.last = min(first + probe::kHeight, params.shape.seqlen_q);
    WorkTile queries = queries_of_block<probe::kHeight>(params, block);
    int count = 0;
    for (; !queries.is_empty() && number < params.shape.seqlen_q; ++count, ++number) {
      const WorkTile tile = take_tile<probe::kHeight, probe::kWidth>(params, queries);
      if (threadIdx.x > 0) continue;
      tiles[2 * number] = tile.first;
      tiles[2 * number + 1] = tile.last;
    }
    if (threadIdx.x == 0) counts[first / probe::kHeight] = count;
  }
}
