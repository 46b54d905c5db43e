#pragma once
#include <attention/append_params.cuh>
#include <attention/tile_scheduler.cuh>

// Code that the kernels that append rows to a cache share. It computes the positions of new rows, and updates the
// length of a sequence.
namespace cuflash::attention {

// The new rows of a sequence have the positions length <= j < length + num_rows.
struct NewRows {
  int length, num_rows;
};

// Return the first position of a sequence's new rows, and how many rows belong to the sequence and fit into it. The
// first block of a sequence counts values that are out of range.
CUFLASH_DEVICE NewRows new_rows(const Append& params, int sequence, int block) {
  const CachePages& cache = params.cache;
  const int found = cache.lengths[sequence], length = min(max(found, 0), cache.capacity);
  const int asked = cache.counts == nullptr ? params.num_rows : cache.counts[sequence];
  const int count = min(max(asked, 0), params.num_rows), num_rows = min(count, cache.capacity - length);
  if (block == 0 && threadIdx.x == 0 && (found != length || asked != count || count != num_rows))
    ptx::fetch_add(cache.num_faults, 1);
  return {length, num_rows};
}

// Set the new length of a sequence. The last of its blocks to read the old length does this. Called by all threads of a
// block.
CUFLASH_DEVICE void set_length(const Append& params, int sequence, const NewRows& rows) {
  __syncthreads();  // all threads have read the length
  if (threadIdx.x != 0) return;
  if (params.blocks_per_sequence > 1) {
    __threadfence();
    if (ptx::fetch_add(params.arrivals + sequence, 1) != params.blocks_per_sequence - 1) return;
    __threadfence();
    tile::reset(params.arrivals + sequence);
  }
  params.cache.lengths[sequence] = rows.length + rows.num_rows;
}

// Return the page of a position, or `num_pages` if the table has no valid page for it.
CUFLASH_DEVICE int page_of(const CachePages& cache, int sequence, int position) {
  if (cache.table == nullptr) return sequence;
  const int page = cache.table[static_cast<int64_t>(sequence) * cache.max_pages + position / cache.page_size];
  return page >= 0 && page < cache.num_pages ? page : cache.num_pages;
}

}  // namespace cuflash::attention
