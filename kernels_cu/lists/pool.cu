// Computes the means of blocks of rows of q and of k, one thread block each. Each sum follows the order of the rows.
#include <lists/selection.cuh>
#include <tile/element.cuh>

namespace cuflash::lists {

using Accumulator = Config::Accumulator;
using Element = Config::Element;

// Write the means of a block of rows. Called by all threads.
CUFLASH_DEVICE void pool_block(const PooledRows& rows, int64_t number) {
  const int block = static_cast<int>(number % rows.num_blocks);
  int64_t matrix = number / rows.num_blocks;
  int64_t start = matrix % rows.num_heads * rows.head_stride;
  matrix /= rows.num_heads;
  for (int axis = 2; axis >= 0; --axis) {
    start += matrix % rows.batch[axis] * rows.batch_strides[axis];
    matrix /= rows.batch[axis];
  }
  const int first = block * rows.block, last = rows.num_rows < first + rows.block ? rows.num_rows : first + rows.block;
  const Element* const data = static_cast<const Element*>(rows.data) + start;
  Accumulator* const means = static_cast<Accumulator*>(rows.means) + number * rows.num_columns;
  for (int column = ptx::thread_index(); column < rows.num_columns; column += kSelectionThreads) {
    const Element* const at = data + column * rows.column_stride;
    Accumulator sum = 0;
#pragma unroll 8
    for (int row = first; row < last; ++row) sum += tile::to_accumulator(at[row * rows.row_stride]);
    means[column] = sum / static_cast<Accumulator>(last - first);
  }
}

}  // namespace cuflash::lists

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_pool(const __grid_constant__ cuflash::lists::Pooling pooling) {
  using namespace cuflash::lists;
  const int64_t number = blockIdx.x, of_q = pooling.num_thread_blocks_of_q;
  if (number < of_q) pool_block(pooling.q, number);
  else pool_block(pooling.k, number - of_q);
}
