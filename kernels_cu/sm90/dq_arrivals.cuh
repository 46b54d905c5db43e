#pragma once
#include <sm90/sequence_parts.cuh>
#include <tile/counter.cuh>

// Sums of dQ if only a few tiles of keys visit a tile of queries. The first tile of keys to arrive stores its part of
// dQ, so that no kernel has to set the sums to 0 first. The others wait for that store, and add their parts. The last
// one waits until all others are done, loads their sums and finishes dQ, so that no further kernel has to round it. A
// tile waits only for tiles that arrived before it. Measured times are in planning/families/sm90_dq.py.
namespace cuflash::sm90 {

// The tiles of keys that visit a tile of queries.
struct DqVisitors {
  int num;  // number of visitors, if the last one to arrive finishes dQ
  int last;  // index of the last visitor, if the visitors add in order
};

// The count of the tiles of keys that have arrived at a tile of queries, plus kArrivalIsDone for each tile that is
// done. Thread blocks change the count while others copy the statistics of the queries; therefore the statistics do not
// contain it. In kernels whose sums of dQ are bitwise reproducible (kAddsDqInOrder), the tiles of keys that visit a
// tile of queries add one after the other, from the end of the sequence on: the last tile stores its part of dQ, and
// each earlier tile adds its own part after its successor. In these kernels, the count is the number of tiles that are
// done.
struct alignas(16) DqCount {
  int count, unused[3];
};
constexpr int kArrivalIsDone = 1 << 16;

// An arrival of a tile of keys at a tile of queries. The last tile of keys to arrive finishes dQ.
struct DqArrival {
  int before;  // number of tiles that arrived before
  int num_awaited;  // number of these tiles that must be done first
  bool is_last;

  // Return the arrival of a tile that read `count` from the counter, if `num` tiles will arrive in total.
  static CUFLASH_DEVICE DqArrival of(int count, int num) {
    const int before = count % kArrivalIsDone;
    const bool is_last = before == num - 1;
    return {before, is_last ? before : min(before, 1), is_last};
  }
};

// Wait until all awaited tiles are done. Called by whole warps.
CUFLASH_DEVICE void wait_for_arrivals(const DqArrival& arrival, const int* count) {
  if (arrival.num_awaited > 0) ptx::wait_for_counter(count, -kArrivalIsDone, arrival.num_awaited * kArrivalIsDone);
}

// Return the number of tiles of Width keys that arrive at a tile of queries: the tiles in the query tile's row of the
// list that some query sees, as BlockIterator visits them. Called by a warp.
template <int Width>
CUFLASH_DEVICE int num_expected_arrivals(const Params& params, const WorkTile& work) {
  const WorkList& list = params.work;
  const int64_t row = list_index(list, work.batch_head) * list.num_q_blocks + work.first / list.block_q;
  const int lo = interval(params, work.batch_head, work.first).lo,
            hi = interval(params, work.batch_head, work.last - 1).hi;
  return tile::warp_sum(list.row_pointers[row], list.row_pointers[row + 1], [&](int entry) {
    const bool is_cut = static_cast<BlockKind>(list.kinds[entry]) == BlockKind::kInterval;
    const int first = list.kv_blocks[entry] * list.block_kv, last = min(first + list.block_kv, params.shape.seqlen_kv);
    int num = 0;
    for (int key = first; key < last; key += Width) num += !is_cut || (lo < min(key + Width, last) && hi > key);
    return num;
  });
}

// Return the number of tiles of Width keys that arrive at a tile of queries without a list: the tiles from the first
// key that the first query sees to the last key that the last query sees.
template <int Width>
CUFLASH_DEVICE int num_visiting_key_tiles(const Params& params, const WorkTile& work) {
  const int lo = interval(params, work.batch_head, work.first).lo,
            hi = interval(params, work.batch_head, work.last - 1).hi;
  return lo < params.shape.seqlen_kv ? max((hi + Width - 1) / Width - lo / Width, 0) : 0;
}

// Return the index of the last tile of Width keys that visits a tile of queries, or 0 if none does. A negative number
// could look like NaN to the checks of CUFLASH_CHECK, which read all statistics as floats.
template <int Width>
CUFLASH_DEVICE int last_visiting_key_tile(const Params& params, const WorkTile& work) {
  return max((interval(params, work.batch_head, work.last - 1).hi + Width - 1) / Width - 1, 0);
}

// Store how many tiles of keys will arrive at a tile of queries. If none will, write dQ = 0. Called by the first warp.
template <class Config>
CUFLASH_DEVICE void store_num_visitors(const Params& params, const WorkTile& work, DqVisitors& visitors) {
  constexpr int Width = Config::kBlockKv;
  int num;
  if constexpr (Config::kIsListed) num = num_expected_arrivals<Width>(params, work);
  else if constexpr (Config::kCutsSequences) num = num_visiting_parts<Width>(params, work);
  else num = num_visiting_key_tiles<Width>(params, work);
  if (threadIdx.x == 0) visitors.num = num;
  if (num > 0) return;
  const Shape& shape = params.shape;
  tile::clear(
      matrix<typename Config::Element>(params.dq, work.batch_head, work.batch_head.head, shape.seqlen_q, shape.head_dim)
          .rows(work.first, work.last));
}

}  // namespace cuflash::sm90
