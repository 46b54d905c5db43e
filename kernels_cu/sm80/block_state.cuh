#pragma once
#include <attention/block_iterator.cuh>
#include <attention/config_mma.cuh>

namespace cuflash::sm80 {

// State of a thread block that keeps a tile of queries and visits blocks of keys. The state is in shared memory, to
// leave registers for accumulators.
struct BlockState {
  Element* k;
  Element* v;
  attention::WorkTile work;
  attention::VisitRange visit_range;
  float softmax_scale_log2;
  bool rows_fill_tiles;  // whether rows of K and V have the number of columns of their tiles
};

}  // namespace cuflash::sm80
