#pragma once
#include <attention/append_params.cuh>
#include <attention/tile_scheduler.cuh>

// The kernels that append rows to a cache share this header. It finds the positions of new rows, and updates the length
// of a sequence.
namespace cuflash::attention {

// The new rows of a sequence have the positions length <= j < length + num_rows.
struct NewRows {
  int length, num_rows;
};

// Return the number of new rows that belong to a sequence and fit into it, and their first position. The sequence's
// first block counts numbers that are out of range.
CUFLASH_DEVICE NewRows new_rows(const Append& params, int sequence, int block) {
  const CachePages& cache = params.cache;
  const int found = cache.lengths[sequence], length = min(max(found, 0), cache.capacity);
  const int asked = cache.counts == nullptr ? params.num_rows : cache.counts[sequence];
  const int count = min(max(asked, 0), params.num_rows), num_rows = min(count, cache.capacity - length);
  if (block == 0 && threadIdx.x == 0 && (found != length || asked != count || count != num_rows))
    ptx::fetch_add(cache.num_faults, 1);
  return {length, num_rows};
}

// Set the new length of a sequence. The last of its blocks to read the old length does so. Called by all threads of a
// block.
CUFLASH_DEVICE void set_length(const Append& params, int sequence, const NewRows& rows) {
  __syncthreads();  // all threads have read the length
  if (threadIdx.x != 0) return;
  if (params.blocks_per_sequence > 1) {
    __threadfence();
    if (ptx::fetch_add(params.arrivals + sequence, 1) != params.blocks_per_sequence - 1) return;
    __threadfence();
    params.arrivals[sequence] = 0;  // reset for the next launch: all blocks of this one have arrived
  }
  params.cache.lengths[sequence] = rows.length + rows.num_rows;
}

// Return the page of a position, or the number of pages if it has none.
CUFLASH_DEVICE int page_of(const CachePages& cache, int sequence, int position) {
  if (cache.table == nullptr) return sequence;
  const int page = cache.table[static_cast<int64_t>(sequence) * cache.max_pages + position / cache.page_size];
  return page >= 0 && page < cache.num_pages ? page : cache.num_pages;
}

}  // namespace cuflash::attention
