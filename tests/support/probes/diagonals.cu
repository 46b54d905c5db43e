#include <tile/diagonal_sums.cuh>
#include <tile/warp_tile.cuh>

// A warp sums the diagonals of 16 x 16 numbers.
extern "C" __global__ void diagonals(const float* numbers, float* sums) {
  using namespace cuflash::tile;
  using Tile = WarpTile<1, 2, 1>;
  DiagonalSums<float> parts;
  for (int i = 0; i < Tile::kRows; ++i)
    for (int j = 0; j < Tile::kColumns; ++j)
      parts.at(i, j) += numbers[16 * (Tile::first_row() + Tile::row(i)) + Tile::first_column() + Tile::column(j)];
  sums[parts.distance() + 16] = parts.of_lane();
}
