#pragma once
#include <attention/block_iterator.cuh>
#include <sm90/staged_array.cuh>
#include <tile/copy_async.cuh>

// The elements of a stored gradient (see store_gradient) that a band hides. No step visits them, so producer warps set
// them to 0. Under a causal mask, a tile of early keys has many steps and few hidden elements, and a tile of late keys
// the other way around. The steps of a tile therefore clear the hidden elements of the opposite tile: the first tile
// those of the last one, and so on. Thus each step clears about one block, and its stores overlap products.
namespace cuflash::sm90 {

// Return the queries that the steps of a tile of keys first <= j < last visit under a band.
template <int BlockQ>
CUFLASH_DEVICE attention::Interval visited_queries(const attention::Params& params,
                                                   const attention::BatchHead& batch_head, int first, int last) {
  const int start = attention::rows_ending_by(params, batch_head, first),
            stop = attention::rows_starting_by(params, batch_head, last - 1);
  return start < stop ? attention::Interval{start / BlockQ * BlockQ, stop} : attention::Interval{0, 0};
}

// Set to 0 one of `num_parts` parts of the hidden elements of the tile opposite to a tile of keys. Called by Threads
// threads. The gradient is an array of the library: its rows consist of aligned chunks.
template <int Threads, int BlockQ, int BlockKv, class Score>
CUFLASH_DEVICE void clear_hidden_gradient(const attention::Params& params, const Score& score,
                                          const attention::WorkTile& work, int part, int num_parts, int thread) {
  using namespace attention;
  constexpr int kChunk = tile::kChunkOf<ptx::Half>, kThreadsPerRow = BlockKv / kChunk;
  const int length = params.shape.seqlen_kv, first = (length - 1) / BlockKv * BlockKv - work.first,
            last = min(first + BlockKv, length);
  const Interval visited = visited_queries<BlockQ>(params, work.batch_head, first, last);
  const int num_hidden = params.shape.seqlen_q - (visited.hi - visited.lo);
  if (num_hidden == 0) return;
  const auto all = score.staged_gradient(score.of_tile(work.batch_head.batch_index, work.batch_head.head));
  const int column = first + thread % kThreadsPerRow * kChunk, end = split_start(num_hidden, part + 1, num_parts);
#pragma unroll 1
  for (int row = split_start(num_hidden, part, num_parts) + thread / kThreadsPerRow; row < end;
       row += Threads / kThreadsPerRow) {
    auto* const to = &all.at(row < visited.lo ? row : row + visited.hi - visited.lo, column);
    if (column < last) ptx::store_aligned(reinterpret_cast<tile::Chunk<ptx::Half>*>(to), tile::Chunk<ptx::Half>{});
  }
}

}  // namespace cuflash::sm90
