#pragma once
#include <attention/steps.cuh>
#include <tile/register_tile.cuh>

namespace cuflash::attention {

// Set what a tile of queries may not see in a step to -inf: keys past the step's end, and masked ones.
template <class T, int Rows, int Columns>
CUFLASH_DEVICE void mask_scores(tile::RegisterTile<T, Rows, Columns>& s, const Params& params, const WorkTile& work,
                                const Step& step) {
  using Tile = tile::RegisterTile<T, Rows, Columns>;
  if (step.kind == Kind::kFull && step.stop - step.start == Columns) return;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int row = work.first + Tile::row(i);
    const Seen seen = step.seen(params, work.place, min(row, work.last - 1));
#pragma unroll
    for (int j = 0; j < Tile::kColumns; ++j) {
      const int key = step.start + Tile::column(j);
      const bool is_there = row < work.last && key < step.stop;
      if (!is_there || !seen.has(key)) s.at[i][j] = ptx::negative_infinity<T>();
    }
  }
}

}  // namespace cuflash::attention
