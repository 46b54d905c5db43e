// Computes upper bounds of the scores of each query and page of keys, one warp per pair: the sum over columns of the
// greater of the query's products with the page's least and greatest key. NaN stays NaN. cuflash/selectors/pages.py is
// the specification.
#include <attention/score_math.cuh>
#include <lists/selection.cuh>
#include <tile/element.cuh>

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
lists_page_bounds(const __grid_constant__ cuflash::lists::PageBounds bounds) {
  using namespace cuflash;
  using namespace cuflash::lists;
  using Accumulator = Config::Accumulator;
  using Element = Config::Element;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * Config::kNumWarps + ptx::thread_index() / 32;
  if (number >= bounds.num_bounds) return;
  const int page = static_cast<int>(number % bounds.num_pages);
  const int64_t row = number / bounds.num_pages, query = row % bounds.num_queries;
  int64_t matrix = row / bounds.num_queries;
  const int64_t head = matrix % bounds.num_heads;
  matrix /= bounds.num_heads;
  int64_t of_q = head * bounds.q.head_stride + query * bounds.q.row_stride;
  int64_t of_k = head / bounds.group_size * bounds.k.head_stride;
  for (int axis = 2; axis >= 0; --axis) {
    of_q += matrix % bounds.batch[axis] * bounds.q.batch_strides[axis];
    of_k += matrix % bounds.batch[axis] * bounds.k.batch_strides[axis];
    matrix /= bounds.batch[axis];
  }
  const int64_t first = static_cast<int64_t>(page) * bounds.page_size, end = first + bounds.page_size;
  const int64_t last = end < bounds.num_keys ? end : bounds.num_keys;
  Accumulator sum = 0;
  for (int column = ptx::lane(); column < bounds.num_columns; column += 32) {
    const Element* const keys = static_cast<const Element*>(bounds.k.data) + of_k + column * bounds.k.column_stride;
    Accumulator least = tile::to_accumulator(keys[first * bounds.k.row_stride]), greatest = least;
    for (int64_t key = first + 1; key < last; ++key) {
      const Accumulator x = tile::to_accumulator(keys[key * bounds.k.row_stride]);
      least = score::minimum(least, x);
      greatest = score::maximum(greatest, x);
    }
    const Accumulator x =
        tile::to_accumulator(static_cast<const Element*>(bounds.q.data)[of_q + column * bounds.q.column_stride]);
    sum += score::maximum(x * least, x * greatest);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (ptx::lane() == 0) static_cast<Accumulator*>(bounds.bounds)[number] = sum;
}
