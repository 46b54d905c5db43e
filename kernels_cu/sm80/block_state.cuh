#pragma once
#include <attention/block_iterator.cuh>
#include <attention/config_mma.cuh>

namespace cuflash::sm80 {

// State of a thread block that keeps a tile of queries and walks blocks of keys. It is in shared memory, to leave
// registers for accumulators.
struct BlockState {
  Element* k;
  Element* v;
  attention::WorkTile work;
  attention::VisitRange visit_range;
  float softmax_scale_log2;
  bool rows_fill_tiles;  // rows of K and V have as many columns as their tiles
};

}  // namespace cuflash::sm80
