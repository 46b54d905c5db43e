// Appends the new keys and values of each sequence to a KV cache. Their positions are computed from the lengths on the
// device, so that a graph with this kernel can be replayed. Several blocks copy the rows of a sequence; the last block
// to read its length sets the new one. Rows that do not fit are dropped and counted.
#include <attention/append_work.cuh>

namespace cuflash::cache {

using attention::Append;
using attention::CachePages;
using attention::Matrices;
using attention::NewRows;
using Element = Config::Element;

constexpr int kThreads = 32 * Config::kNumWarps;
struct alignas(16) Unit {
  uint64_t at[2];
};

// Return whether rows consist of units that start at multiples of the unit's size.
CUFLASH_DEVICE bool has_aligned_units(const Matrices& matrices, int num_columns) {
  constexpr int kElements = sizeof(Unit) / sizeof(Element);
  const auto is_whole = [](int64_t stride) { return stride % kElements == 0; };
  return matrices.column_stride == 1 && num_columns % kElements == 0 && is_whole(matrices.batch_strides[0]) &&
         is_whole(matrices.head_stride) && is_whole(matrices.row_stride) &&
         reinterpret_cast<uint64_t>(matrices.data) % sizeof(Unit) == 0;
}

// A part of a row of the cache. Parts are numbered over the keys of all heads, then over the values of all heads.
template <class Part>
struct Place {
  static constexpr int kElements = sizeof(Part) / sizeof(Element);

  bool is_value;
  int head, column;

  CUFLASH_DEVICE Place(const Append& params, int number) {
    const int k_parts = params.cache.head_dim / kElements, v_parts = params.cache.value_dim / kElements;
    const int of_keys = params.cache.num_kv_heads * k_parts;
    is_value = number >= of_keys;
    const attention::DivMod at = attention::divmod(is_value ? number - of_keys : number, is_value ? v_parts : k_parts);
    head = at.quotient;
    column = at.remainder * kElements;
  }
  CUFLASH_DEVICE Part& at(const Matrices& k, const Matrices& v, int first, int row) const {
    const attention::BatchHead place{{first}, 0, head};
    return reinterpret_cast<Part&>(attention::matrix<Element>(is_value ? v : k, place, head, 0, 0).at(row, column));
  }
};

// Copy the new rows of a sequence in parts of type Part. A thread loads its first part before it reads the length.
// Called by all threads of the sequence's blocks.
template <class Part>
CUFLASH_DEVICE NewRows copy_rows(const Append& params, int sequence, int block) {
  constexpr int kElements = Place<Part>::kElements;
  const CachePages& cache = params.cache;
  const int parts = cache.num_kv_heads * (cache.head_dim / kElements + cache.value_dim / kElements);
  const int num_threads = params.blocks_per_sequence * kThreads, thread = block * kThreads + threadIdx.x;
  const int rows_at_once = max(1, num_threads / parts);
  const attention::DivMod start = attention::divmod(thread, parts);
  const Place<Part> first(params, start.remainder);
  const bool has_first = start.quotient < min(rows_at_once, params.num_rows);
  Part x{};
  if (has_first) x = first.at(params.k, params.v, sequence, start.quotient);
  const NewRows rows = attention::new_rows(params, sequence, block);
  if (start.quotient >= rows_at_once) return rows;
  for (int row = start.quotient; row < rows.num_rows; row += rows_at_once) {
    const int position = rows.length + row, page = attention::page_of(cache, sequence, position);
    if (page == cache.num_pages) {
      if (start.remainder == 0) ptx::fetch_add(cache.num_faults, 1);
      continue;
    }
    for (int number = start.remainder; number < parts; number += num_threads) {
      const Place<Part> place(params, number);
      if (row != start.quotient || number != start.remainder) x = place.at(params.k, params.v, sequence, row);
      place.at(cache.k, cache.v, page, position % cache.page_size) = x;
    }
  }
  return rows;
}

}  // namespace cuflash::cache

extern "C" __global__ void __launch_bounds__(cuflash::cache::kThreads)
cache_append(const __grid_constant__ cuflash::attention::Append params) {
  using namespace cuflash;
  using namespace cuflash::cache;
  const attention::CachePages& cache = params.cache;
  const attention::DivMod at = attention::divmod(blockIdx.x, params.blocks_per_sequence);
  const bool is_aligned = has_aligned_units(params.k, cache.head_dim) && has_aligned_units(params.v, cache.value_dim) &&
                          has_aligned_units(cache.k, cache.head_dim) && has_aligned_units(cache.v, cache.value_dim);
  const NewRows rows = is_aligned ? copy_rows<Unit>(params, at.quotient, at.remainder)
                                  : copy_rows<Element>(params, at.quotient, at.remainder);
  attention::set_length(params, at.quotient, rows);
}
