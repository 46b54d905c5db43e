// Appends the new keys and values of each sequence to a KV cache. The positions follow from the lengths on the device, so that a
// graph with this kernel can be replayed. Several blocks copy the rows of a sequence; the last block to read its length sets the
// new one. Rows for which there is no room are dropped and counted.
#include <attention/append_params.cuh>
#include <attention/tile_scheduler.cuh>

namespace cuflash {

using attention::Append;
using attention::CachePages;
using attention::Matrices;
using config::Element;

constexpr int kThreads = 32 * config::kNumWarps;
struct alignas(16) Unit {
  uint64_t at[2];
};

// Returns whether rows consist of units that start at multiples of their size.
CUFLASH_DEVICE bool has_aligned_units(const Matrices& matrices, int num_columns) {
  constexpr int kElements = sizeof(Unit) / sizeof(Element);
  const auto is_whole = [](int64_t stride) { return stride % kElements == 0; };
  return matrices.column_stride == 1 && num_columns % kElements == 0 && is_whole(matrices.batch_strides[0]) &&
         is_whole(matrices.head_stride) && is_whole(matrices.row_stride) &&
         reinterpret_cast<uint64_t>(matrices.data) % sizeof(Unit) == 0;
}

// The page of a position; the number of pages if the position has none.
CUFLASH_DEVICE int page_of(const CachePages& cache, int sequence, int position) {
  if (cache.table == nullptr) return sequence;
  const int page = cache.table[static_cast<int64_t>(sequence) * cache.max_pages + position / cache.page_size];
  return page >= 0 && page < cache.num_pages ? page : cache.num_pages;
}

// Copy rows first <= t of a sequence as parts of a type. By all threads of its blocks.
template <class Part>
CUFLASH_DEVICE void copy_rows(const Append& params, const Matrices& from, const Matrices& to, int num_columns, int sequence,
                              int length, int num_rows, int block, bool counts_faults) {
  constexpr int kElements = sizeof(Part) / sizeof(Element);
  const CachePages& cache = params.cache;
  const int parts = num_columns / kElements;
  const int64_t num_parts = static_cast<int64_t>(num_rows) * cache.num_kv_heads * parts;
  for (int64_t at = static_cast<int64_t>(block) * kThreads + threadIdx.x; at < num_parts;
       at += static_cast<int64_t>(params.blocks_per_sequence) * kThreads) {
    const int64_t number = at / parts;
    const int part = at - number * parts, row = number / cache.num_kv_heads, head = number - int64_t(row) * cache.num_kv_heads;
    const int position = length + row, page = page_of(cache, sequence, position);
    if (page == cache.num_pages) {
      if (counts_faults && part == 0 && head == 0) ptx::fetch_add(cache.num_faults, 1);
      continue;
    }
    const attention::BatchHead source{{sequence}, 0, head}, target{{page}, 0, head};
    const auto column = part * kElements;
    reinterpret_cast<Part&>(attention::matrix<Element>(to, target, head, 0, 0).at(position % cache.page_size, column)) =
        reinterpret_cast<const Part&>(attention::matrix<Element>(from, source, head, 0, 0).at(row, column));
  }
}

CUFLASH_DEVICE void append(const Append& params, const Matrices& from, const Matrices& to, int num_columns, int sequence,
                           int length, int num_rows, int block, bool counts_faults) {
  if (has_aligned_units(from, num_columns) && has_aligned_units(to, num_columns))
    copy_rows<Unit>(params, from, to, num_columns, sequence, length, num_rows, block, counts_faults);
  else copy_rows<Element>(params, from, to, num_columns, sequence, length, num_rows, block, counts_faults);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
cache_append(const __grid_constant__ cuflash::attention::Append params) {
  using namespace cuflash;
  const CachePages& cache = params.cache;
  const int sequence = blockIdx.x / params.blocks_per_sequence, block = blockIdx.x % params.blocks_per_sequence;
  const int found = cache.lengths[sequence], length = min(max(found, 0), cache.capacity);
  const int asked = cache.counts == nullptr ? params.num_rows : cache.counts[sequence];
  const int count = min(max(asked, 0), params.num_rows), num_rows = min(count, cache.capacity - length);
  __syncthreads();  // all threads have read the length
  if (threadIdx.x == 0) {
    if (block == 0 && (found != length || asked != count || count != num_rows)) ptx::fetch_add(cache.num_faults, 1);
    __threadfence();
    if (ptx::fetch_add(params.arrivals + sequence, 1) == params.blocks_per_sequence - 1) {
      __threadfence();
      cache.lengths[sequence] = length + num_rows;
      params.arrivals[sequence] = 0;  // for the next launch: no block of this one is left
    }
  }
  append(params, params.k, cache.k, cache.head_dim, sequence, length, num_rows, block, true);
  append(params, params.v, cache.v, cache.value_dim, sequence, length, num_rows, block, false);
}
