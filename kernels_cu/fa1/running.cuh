#pragma once
#include <attention/config_mma.cuh>
#include <attention/tiling.cuh>
#include <tile/accumulator_layout.cuh>

// State of the loops of FlashAttention-1 (arXiv 2205.14135): its sums in global memory, and its masks. An outer
// iteration of a kernel works on a tile of keys, an inner iteration on a tile of queries that attends these keys.
namespace cuflash::fa1 {

// Arrays of the forward kernel that hold the state of each query. cuflash/planning/families/fa1.py has the same record.
struct Running {
  attention::Matrices running_o;  // [query tiles, kBlockQ * kValueDim] float32: O of the keys so far, divided by l
  attention::Matrices running_statistics;  // [seqlen_q, 2] float32: m, the largest product q k^T so far, and l
};

// State of the outer iteration, which a thread block keeps in shared memory to save registers.
struct BlockState {
  attention::WorkTile keys;
  attention::VisitRange visit_range;  // queries that attend the keys
};

// Return the sums of a tile of queries in global memory, in the accumulator layout of the block's warps: a thread reads
// back the sums that it wrote.
template <class Tile>
CUFLASH_DEVICE tile::AccumulatorLayout<Tile, 4> sums_of_tile(const attention::Params& params,
                                                             const attention::Matrices& sums,
                                                             const attention::BatchHead& batch_head, int first_query) {
  const int64_t number = attention::query_tile_number<Listed>(params, first_query, kBlockQ);
  float* const data = attention::matrix<float>(sums, batch_head, batch_head.head, 0, 0).data;
  return tile::AccumulatorLayout<Tile, 4>(data + number * sums.row_stride);
}

// Set the sums of all tiles of a head to 0. Called by all threads.
CUFLASH_DEVICE void clear_sums(const attention::Params& params, const attention::Matrices& sums,
                               const attention::BatchHead& batch_head, int sums_per_tile) {
  float* const data = attention::matrix<float>(sums, batch_head, batch_head.head, 0, 0).data;
  const int64_t num_sums = static_cast<int64_t>(attention::query_tiling(params, kBlockQ).num_tiles()) * sums_per_tile;
  for (int64_t x = 4 * threadIdx.x; x < num_sums; x += 4 * kThreads)
    *reinterpret_cast<tile::Bits128*>(data + x) = {};
}

// Start copying a tile of K or V. Rows that no query of the head attends become 0, since a weight of 0 times NaN is
// NaN.
template <class Tile>
CUFLASH_DEVICE void load_visible_rows(const attention::Params& params, const attention::WorkTile& keys, Tile to,
                                      const attention::Matrices& matrices, int num_columns) {
  using namespace attention;
  const Shape& shape = params.shape;
  const int kv_head = divmod(keys.batch_head.head, shape.group_size).quotient;
  const int first = interval(params, keys.batch_head, 0).lo,
      last = interval(params, keys.batch_head, shape.seqlen_q - 1).hi;
  const auto all = matrix<Element>(matrices, keys.batch_head, kv_head, shape.seqlen_kv, num_columns);
  tile::load_async<kThreads>(to, all.rows(keys.first, max(keys.first, min(keys.last, last))), first - keys.first);
}

// Store the keys of an outer iteration, and the range of queries that attend them, extended to whole tiles. Called by
// all threads, between barriers.
CUFLASH_DEVICE void begin_keys(const attention::Params& params, const attention::WorkTile& keys, BlockState& state) {
  const auto visit_range = attention::aligned_to_tiles(params, attention::visit_range_of_keys(params, keys), kBlockQ);
  if (threadIdx.x == 0) state = {keys, visit_range};
}

// Return whether no score of an inner iteration needs a mask.
CUFLASH_DEVICE bool fills_tiles(const attention::WorkTile& keys, const attention::KvBlock& queries) {
  return queries.kind == attention::BlockKind::kFull && queries.stop - queries.start == kBlockQ &&
         keys.last - keys.first == kBlockKv;
}

// Set the masked scores of an inner iteration to a value.
template <class Scores>
CUFLASH_DEVICE void mask_iteration(Scores& s, const attention::Params& params, const attention::WorkTile& keys,
                                   const attention::KvBlock& queries, float value) {
  attention::mask_scores<Config::kIsListed>(s, params, {keys.batch_head, queries.start, queries.stop},
                                            {keys.first, keys.last, queries.kind, queries.entry}, value);
}

}  // namespace cuflash::fa1
