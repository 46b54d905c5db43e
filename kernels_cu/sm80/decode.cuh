// Attention of a few new tokens to the keys and values of a cache (split-KV decoding: Flash-Decoding, T. Dao et al.,
// 2023). A thread block works on a part of the keys of one sequence for one key/value head. The rows of its tile are
// the queries of all heads that share the key/value head. Its warps divide the keys, not the rows, among themselves:
// each warp has its own softmax, and the warps merge at the end. The number of parts of a sequence depends only on its
// length, and the block that ends last merges the parts in order. Therefore the results of a sequence are bitwise
// identical whatever else is in the batch and wherever its pages are.
//
// A kernel passes a type `Stage`, which defines how a pipeline stage holds keys and values:
//   Arrays                 the arguments of the kernel in addition to its parameters
//   KTile, VTile, Stored   tiles of keys and values, and the type of their elements
//   kThreadsPerRow         number of threads that share the copy of a row
//   kBytes                 size of a stage in bytes, a multiple of 128; a stage is constructed from its first byte
//   start_scales           starts copying the scales of 16 rows; called by the first of the warps that share them
//   queries                returns the queries of the warp, once they are in shared memory
//   multiply, add          multiply queries by the keys of the stage, and add its values times their weights
//   store_row              stores a row of a thread's output
//   kMayBeUnaligned        rows may start anywhere and have any strides; otherwise they consist of aligned chunks
#pragma once
#include <attention/score.cuh>
#include <sm80/cache_copy.cuh>
#include <sm80/decode_epilogue.cuh>

namespace cuflash::sm80 {

// Replace the scores of a step by the score function's results. Rows of the tile are the queries of all heads of the
// group.
template <class Queries, class Score>
CUFLASH_DEVICE void score_step(Scores& s, const Decode& params, const Queries& own, const attention::BatchHead& heads,
                               const attention::Positions& keys, const Score& score) {
  const int last_row = params.group_size * params.num_queries - 1;
  const auto query_of = [&](int i) {
    const attention::DivMod row = attention::divmod(min(attention::row_of(s, i), last_row), params.num_queries);
    return attention::HeadAndQuery{heads.head + row.quotient, own.position(row.remainder)};
  };
  attention::apply_score(s, score, params.softmax_scale, heads, query_of, keys, 1);
}

// Queries that attend keys in the order of their positions. `Rows` returns the keys that each row of the tile attends.
template <class Rows>
struct QueriesInOrder : Rows {
  using Keys = AllKeys;

  AllKeys keys;
  attention::Interval seen;  // interval of keys that all rows see

  CUFLASH_DEVICE QueriesInOrder(const Rows& rows, int first_key)
      : Rows(rows), keys{first_key}, seen(rows.seen_by_all()) {}
  CUFLASH_DEVICE attention::Positions positions(int start, int stop) const { return {start, stop}; }
  // Set the scores of keys that a row does not attend to -inf, in the step whose first key is `start`.
  CUFLASH_DEVICE void mask(Scores& s, int start, int stop, const Part& part) const {
    if (start < seen.lo || start + kBlockKv > min(seen.hi, part.stop))
      attention::mask_rows<false>(s, attention::KvBlock{start, stop, attention::BlockKind::kInterval, 0},
                                  ptx::negative_infinity<float>(), [&](int row) { return this->row_mask(row); });
  }
};

// A query that attends chosen blocks, for all heads that share them. The keys of a step are places.
struct QueryOfChosenBlocks {
  using Keys = ChosenKeysOf;

  Keys keys;
  int query_position;

  CUFLASH_DEVICE int position(int) const { return query_position; }
  CUFLASH_DEVICE attention::Positions positions(int start, int) const {
    const attention::Interval seen = keys.chosen.seen();
    const int first = position_of_warp(start, keys.chosen.num_places());
    return {first - key_group() * kKeysOfWarp, max(1, min(first + kKeysOfWarp, seen.hi))};
  }
  CUFLASH_DEVICE void mask(Scores& s, int start, int, const Part& part) const {
    const attention::Interval seen = keys.chosen.seen();
    const bool is_part = start + key_group() * kKeysOfWarp < part.stop;
    const int first = position_of_warp(start, part.stop);
    const int lo = seen.lo - first, hi = is_part ? seen.hi - first : 0;
    if (lo <= 0 && hi >= kKeysOfWarp) return;
#pragma unroll
    for (int j = 0; j < Scores::kColumns; ++j) {
      const int key = Scores::first_column() - key_group() * kKeysOfWarp + Scores::column(j);
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i)
        if (key < lo || key >= hi) s.at(i, j) = ptx::negative_infinity<float>();
    }
  }

 private:
  // Return the position of the warp's first key in a step, or 0 past the last place.
  CUFLASH_DEVICE int position_of_warp(int start, int stop) const {
    const int place = start + key_group() * kKeysOfWarp;
    return place < stop ? keys.position(place) : 0;
  }
};

// The work of a thread block: a part of the keys that the queries of a key/value head attend.
struct DecodeTile {
  attention::BatchHead heads;  // the first query head
  int sequence, kv_head;  // sequence and head of the keys and values
  int number;  // index of the tile among those with separate parts
  Part part;
};

// Start copying the queries of a tile, whose first head is heads.head. Called by all threads, before `decode`.
CUFLASH_DEVICE void start_queries(const Decode& params, const attention::BatchHead& heads) {
  const auto q = attention::matrix<Element>(params.q, heads, heads.head, params.num_queries, params.cache.head_dim);
  const int num_rows = params.group_size * params.num_queries;
  tile::load_async<kThreads>(q_smem, tile::StackedRows<Element>{q, params.q.head_stride, num_rows});
  ptx::cp_async_commit();
}

// The body of a decode kernel, after `start_queries`. `own` returns the keys that each row of the tile attends: a
// QueriesInOrder or a QueryOfChosenBlocks.
template <class Stage, class Queries, class Score>
CUFLASH_DEVICE void decode(const Decode& params, const typename Stage::Arrays& arrays, const DecodeTile& work,
                           const Queries& own, attention::SinkArgument<Config> sink, const Score& score) {
  using namespace attention;
  static_assert(4 * kMergeFloats <= kBytesOfDecode<Stage>, "there is room for what is merged");
  const BatchHead& heads = work.heads;
  const Part& part = work.part;
  const int num_rows = params.group_size * params.num_queries;
  const int num_steps = (part.stop - part.start + kBlockKv - 1) / kBlockKv;  // 0 for an empty sequence
  CacheCopy<Stage, typename Queries::Keys> copy(params, arrays, work.sequence, work.kv_head, own.keys, part);
#pragma unroll 1  // keeps the code small: the cache loads it once
  for (int stage = 0; stage < kNumStages; ++stage) {
    if (stage < num_steps) copy.start_next(stage);
    ptx::cp_async_commit();
  }
  const float softmax_scale_log2 = Softmax::scale_log2(kHasScore ? 1.0 : params.softmax_scale);
  const bool has_lower_rows = kRowGroups > 1 || num_rows > 8;
  RowStats stats;
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    stats.max[i] = ptx::negative_infinity<float>();
    stats.sum[i] = 0;
  }
  Output o;
  o.fill(0);
  ptx::cp_async_wait<kNumStages>();
  __syncthreads();  // the queries have arrived
  const auto queries = Stage::queries();
  int stage = 0;
  for (int step = 0; step < num_steps; ++step) {
    ptx::cp_async_wait<kNumStages - 1>();
    sync_key_group();  // keys and values of the step have arrived
    Scores s;
    stage_smem<Stage>(stage).multiply(s, queries);
    const int start = part.start + step * kBlockKv, stop = min(start + kBlockKv, part.stop);
    if constexpr (kHasScore) score_step(s, params, own, heads, own.positions(start, stop), score);
    else if (Softmax::needs_negation(params.softmax_scale)) Softmax::negate(s, params.softmax_scale);
    own.mask(s, start, stop, part);
    stats.update(s, o, softmax_scale_log2, has_lower_rows);
    stage_smem<Stage>(stage).add(o, s);
    sync_key_group();  // keys and values of the step have been read
    if (step + kNumStages < num_steps) copy.start_next(stage);
    ptx::cp_async_commit();
    stage = stage + 1 == kNumStages ? 0 : stage + 1;
  }
  const int64_t first_row = static_cast<int64_t>(work.number) * params.max_parts * num_rows;
  const bool is_only = part.num_parts == 1;
  auto* const stats_parts = is_only ? reinterpret_cast<tile::Float2*>(merge_room() + kOnlyStats)
                                    : reinterpret_cast<tile::Float2*>(params.stats_parts) + first_row;
  float* const o_parts = is_only ? merge_room() + kOnlyO : params.o_parts + first_row * kValueDim;
  const int number = static_cast<int>(blockIdx.x) - work.number * params.max_parts;  // not held during the steps
  merge_warps<Stage>(stats, o, num_rows, softmax_scale_log2, stats_parts + number * num_rows,
                     o_parts + number * num_rows * kValueDim);
  int* const arrivals = params.arrivals + work.number;
  if (!arrives_last(arrivals, part.num_parts)) return;
  merge_parts(params, heads, {stats_parts, o_parts, num_rows}, part.num_parts, softmax_scale_log2, sink);
  if (threadIdx.x == 0) tile::reset(arrivals);
}

// The body of a decode kernel whose keys and values are in a cache.
template <class Stage, class Score>
CUFLASH_DEVICE void decode_cache(const Decode& params, const typename Stage::Arrays& arrays, attention::NoChosenPages,
                                 attention::SinkArgument<Config> sink, const Score& score) {
  using namespace attention;
  const DivMod by_part = divmod(blockIdx.x, params.max_parts),
               by_head = divmod(by_part.quotient, params.cache.num_kv_heads);
  const int number = by_head.quotient, kv_head = by_head.remainder;
  const BatchHead heads{{number}, number, kv_head * params.group_size};
  const Sequence of = sequence(params, number, [&] { start_queries(params, heads); });
  const Part part = part_of<kBlockKv>(params, of, by_part.remainder);
  if (part.number >= part.num_parts) return ptx::cp_async_wait<0>();  // for the queries
  if (!of.is_valid && threadIdx.x == 0) ptx::fetch_add(params.cache.num_faults, 1);
  decode<Stage>(params, arrays, {heads, number, kv_head, by_part.quotient, part},
                QueriesInOrder<NewTokens>{{params, of}, of.first_key}, sink, score);
}

// Return the matrices that start at a row of `matrices`.
CUFLASH_DEVICE attention::Matrices from_row(attention::Matrices matrices, int row, int itemsize) {
  matrices.data = static_cast<unsigned char*>(matrices.data) + row * matrices.row_stride * itemsize;
  return matrices;
}

// The body of a decode kernel whose new tokens each choose blocks of their sequence. A thread block works on one new
// token, for the heads that share its list.
template <class Stage, class Score>
CUFLASH_DEVICE void decode_cache(const Decode& params, const typename Stage::Arrays& arrays,
                                 const attention::ChosenPages& chosen, attention::SinkArgument<Config> sink,
                                 const Score& score) {
  using namespace attention;
  const DivMod by_part = divmod(blockIdx.x, params.max_parts),
               by_list = divmod(by_part.quotient, chosen.num_list_heads),
               at = divmod(by_list.quotient, chosen.num_rows);
  const int number = at.quotient, row = at.remainder, list_head = by_list.remainder;
  Decode own = params;
  own.q = from_row(params.q, row, sizeof(Element));
  own.o = from_row(params.o, row, sizeof(Element));
  own.lse = from_row(params.lse, row, sizeof(float));
  own.num_queries = 1;
  own.group_size = chosen.heads_per_list;
  const BatchHead heads{{number}, number, list_head * chosen.heads_per_list};
  const Sequence of = sequence(params, number, [&] { start_queries(own, heads); });
  if (!of.is_valid && by_part.remainder == 0 && threadIdx.x == 0) ptx::fetch_add(params.cache.num_faults, 1);
  const RowMask seen = packed_row_mask(params, of, row);
  const ChosenKeys keys(chosen, OwnList(chosen, number, list_head, row), {seen.lo, seen.hi}, room_of_list<Stage>());
  const Part part = part_of<kBlockKv>(params, {keys.num_places(), 1, 0, true}, by_part.remainder);
  if (part.number >= part.num_parts) return ptx::cp_async_wait<0>();  // for the queries
  const int kv_head = divmod(heads.head, params.group_size).quotient;
  decode<Stage>(own, arrays, {heads, number, kv_head, by_part.quotient, part},
                QueryOfChosenBlocks{{keys}, max(0, of.length - of.count + row)}, sink, score);
}

}  // namespace cuflash::sm80
