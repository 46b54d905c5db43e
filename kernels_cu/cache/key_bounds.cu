// Updates the elementwise minimum and maximum of the keys of each page that receives new rows, before the rows are
// appended. A warp works on one page and key/value head. The bounds of a page whose first row is new depend only on new
// rows.
#include <attention/append_work.cuh>
#include <tile/element.cuh>

namespace cuflash::cache {

using attention::Append;
using attention::NewRows;
using Element = Config::Element;

// Return the smaller or, in the second function, the greater of two numbers; NaN if one of them is NaN.
CUFLASH_DEVICE Element lesser(Element x, Element y) {
  const auto of_x = tile::to_accumulator(x), of_y = tile::to_accumulator(y);
  return of_x <= of_y || of_x != of_x ? x : y;
}
CUFLASH_DEVICE Element greater(Element x, Element y) {
  const auto of_x = tile::to_accumulator(x), of_y = tile::to_accumulator(y);
  return of_x >= of_y || of_x != of_x ? x : y;
}

}  // namespace cuflash::cache

extern "C" __global__ void __launch_bounds__(32 * cuflash::Config::kNumWarps)
cache_key_bounds(const __grid_constant__ cuflash::attention::Append params,
                 const __grid_constant__ cuflash::attention::KeyBounds bounds) {
  using namespace cuflash;
  using namespace cuflash::cache;
  const attention::CachePages& cache = params.cache;
  const int number = blockIdx.x * Config::kNumWarps + ptx::thread_index() / 32;
  const attention::DivMod by_head = attention::divmod(number, cache.num_kv_heads),
                          by_page = attention::divmod(by_head.quotient, bounds.pages_per_sequence);
  const int sequence = by_page.quotient, head = by_head.remainder;
  if (sequence >= cache.batch) return;
  const NewRows rows = attention::new_rows(params, sequence, 1);  // the append kernel counts out-of-range values
  const int start = (rows.length / cache.page_size + by_page.remainder) * cache.page_size;
  const int first = max(0, start - rows.length), last = min(rows.num_rows, start + cache.page_size - rows.length);
  if (first >= last) return;
  const int page = attention::page_of(cache, sequence, start);
  if (page == cache.num_pages) return;
  const auto k = attention::matrix<Element>(params.k, {{sequence}, 0, head}, head, params.num_rows, cache.head_dim);
  Element* const least = static_cast<Element*>(bounds.key_bounds) +
      (static_cast<int64_t>(page) * cache.num_kv_heads + head) * 2 * cache.head_dim;
  Element* const greatest = least + cache.head_dim;
  for (int column = ptx::lane(); column < cache.head_dim; column += 32) {
    const bool is_new = start >= rows.length;
    Element low = is_new ? k.at(first, column) : least[column], high = is_new ? low : greatest[column];
    for (int row = first; row < last; ++row) {
      const Element x = k.at(row, column);
      low = lesser(low, x);
      high = greater(high, x);
    }
    least[column] = low;
    greatest[column] = high;
  }
}
