// FlashAttention-2's forward pass (arXiv 2307.08691, algorithm 1) on the tensor cores of Ampere. A thread block works
// on one tile of queries and visits their keys; each warp keeps its rows of S, P and O in registers. K of the next step
// is copied while the softmax of this step runs, and V while its scores are multiplied. If there are too few tiles for
// the chip, several blocks divide the keys of a tile among themselves (split-KV), and combine.cu merges their parts. If
// there are also few queries, a tile holds those of all heads that share a key/value head (pack_gqa). If queries choose
// their blocks, a tile holds neighboring queries with all heads that share their lists (packs_queries).
#include <attention/config_mma.cuh>
#include <attention/dropout.cuh>
#include <attention/members.cuh>
#include <attention/page_table.cuh>
#include <attention/score.cuh>
#include <attention/sink.cuh>
#include <ptx/cp_async.cuh>
#include <sm80/block_state.cuh>
#include <sm80/parts.cuh>

namespace cuflash::sm80 {

constexpr bool kPackGqa = Config::kPackGqa;
constexpr bool kPacksQueries = Config::kPacksQueries;
constexpr bool kIsSplit = Config::kIsSplit;

constexpr int kRowTiles = kBlockQ / (16 * kNumWarps);
using Scores = tile::WarpTile<kRowTiles, kBlockKv / 8, kNumWarps>;
using Output = tile::WarpTile<kRowTiles, kValueDim / 8, kNumWarps>;
using Softmax = attention::LazySoftmax<Scores::kRows>;
using Walk = tile::Conditional<kPacksQueries, attention::OverUnions, attention::OverKvBlocks>;
using MembersOfTile = attention::MembersOf<Config, Scores>;

constexpr QTile q_smem{0};
constexpr OTile o_smem{0};  // overwrites Q, once all threads have read it
constexpr KTile k_smem{QTile::kBytes > OTile::kBytes ? QTile::kBytes : OTile::kBytes};
constexpr VTile v_smem{k_smem.start + KTile::kBytes};
constexpr int kStateOffset = v_smem.start + VTile::kBytes;

// Return the tile of a thread block; several blocks may share it.
CUFLASH_DEVICE attention::WorkTile tile_of_block(const attention::Params& params, attention::NoPages,
                                                 attention::ChosenArgument<Config> chosen) {
  if (kPackGqa) return attention::packed_query_tile(params, kBlockQ, params.shape.num_splits);
  return attention::tile_of_block<Listed>(params, chosen, kBlockQ, kIsSplit ? params.shape.num_splits : 1);
}

CUFLASH_DEVICE attention::WorkTile tile_of_block(const attention::Params& params, const attention::Pages& pages,
                                                 attention::ChosenArgument<Config>) {
  return attention::query_tile_of_sequence<Listed>(params, pages, kBlockQ, attention::first_tile_number());
}

// Return the range of keys that the block visits: all keys that the tile's queries attend, or the block's part of them.
CUFLASH_DEVICE attention::VisitRange visit_range_of_block(const attention::Params& params, attention::WorkTile work,
                                                          attention::ChosenArgument<Config> chosen) {
  using namespace attention;
  if (kPackGqa) work.last = params.shape.seqlen_q;  // all heads have the same queries
  VisitRange full_range = visit_range_of_tile(params, chosen, work);
  if (Config::kIsPaged) align_steps(full_range, kBlockKv);
  const int num_splits = params.shape.num_splits;
  return kIsSplit ? split_range<kBlockKv, Listed>(params, full_range, split_index(num_splits), num_splits) : full_range;
}

// Start copying Q.
CUFLASH_DEVICE void load_q(const attention::Params& params, const attention::WorkTile& work,
                           attention::ChosenArgument<Config> chosen) {
  const attention::Shape& shape = params.shape;
  if (!kPackGqa) {
    tile::load_async<kThreads>(q_smem, attention::rows_of_tile<Element>(chosen, params.q, work, shape.head_dim));
    return;
  }
  const auto q = attention::matrix<Element>(params.q, work.batch_head, work.batch_head.head, shape.seqlen_q,
                                            shape.head_dim);
  tile::load_async<kThreads>(q_smem, tile::StackedRows<Element>{q, params.q.head_stride, work.last});
}

// Store the tile of the block, and the addresses of K and V. Called by one thread.
CUFLASH_DEVICE void save_state(const attention::Params& params, const attention::WorkTile& work,
                               const attention::VisitRange& visit_range,
                               BlockState& state) {
  using namespace attention;
  const Shape& shape = params.shape;
  const int kv_head = divmod(work.batch_head.head, shape.group_size).quotient;
  const BatchHead place = Config::kIsPaged ? BatchHead{} : work.batch_head;  // the first page, if there are pages
  state.k = matrix<Element>(params.k, place, kv_head, 0, 0).data;
  state.v = matrix<Element>(params.v, place, kv_head, 0, 0).data;
  state.work = work;
  state.visit_range = visit_range;
  state.softmax_scale_log2 = Softmax::scale_log2(exponent_scale(shape));
  state.rows_fill_tiles =
      has_full_rows<KTile>(state.k, params.k, shape.head_dim) &&
          has_full_rows<VTile>(state.v, params.v, shape.value_dim);
}

// Start copying the rows of K, or of V, of a step.
template <class Tile>
CUFLASH_DEVICE void load_block(Tile to, Element* data, const attention::Matrices& matrices, int num_columns,
                               const attention::KvBlock& block, bool rows_fill_tiles, attention::NoPages,
                               const BlockState&) {
  if (__builtin_expect(rows_fill_tiles && block.stop - block.start == kBlockKv, true)) {
    const int64_t row_stride = matrices.row_stride;
    tile::FullTileCopy<kThreads, Element, kBlockKv,
        Tile::kChunks * Tile::kChunk>(to, data + block.start * row_stride, row_stride)
        .start();
  } else {
    tile::load_async<kThreads, false>(to, rows(data, matrices, num_columns, block.start, block.stop));
  }
}

// Start copying the rows of K, or of V, of a step from the pages of a sequence. Rows that are not visited and rows
// without a page become 0; the latter are counted as faults.
template <class Tile>
CUFLASH_DEVICE void load_block(Tile to, Element* data, const attention::Matrices& matrices, int num_columns,
                               const attention::KvBlock& block, bool, const attention::Pages& pages,
                               const BlockState& state) {
  using Partition = tile::ChunkPartition<kThreads, Tile>;
  const int sequence = state.work.batch_head.batch_index, first = attention::first_key(state.visit_range);
#pragma unroll
  for (int row = Partition::first_row(); row < kBlockKv; row += Partition::kRowsPerPass) {
    const int position = block.start + row;
    const bool is_visited = position >= first && position < block.stop;
    const int page = is_visited ? attention::page_of(pages, sequence, position) : 0;
    const bool is_there = is_visited && page < pages.num_pages;
    if (is_visited && !is_there && Partition::first_chunk() == 0) ptx::fetch_add(pages.num_faults, 1);
    const int64_t row_of_page = is_there ? attention::divmod(position, pages.page_size).remainder : 0;
    const Element* const from = data + (is_there ? page : 0) * matrices.batch_strides[attention::kBatchAxes - 1] +
                                row_of_page * matrices.row_stride;
#pragma unroll
    for (int c = 0; c < Tile::kChunks; c += Partition::kThreadsPerRow) {
      const int chunk = Partition::first_chunk() + c, column = chunk * Tile::kChunk;
      const bool has_column = column < num_columns;
      ptx::cp_async_cg_16(to.address(row, chunk), from + (has_column ? column : 0), is_there && has_column ? 16 : 0);
    }
  }
}

CUFLASH_DEVICE void mask_block(Scores& s, const attention::Params& params, const BlockState& state,
                               const attention::KvBlock& block, const MembersOfTile& members) {
  using namespace attention;
  const float hidden = ptx::negative_infinity<float>();
  if (kPackGqa) mask_scores<false>(s, params, state.work, block, hidden, PackedQuery{params.shape.seqlen_q});
  else mask_step<Config::kIsListed>(s, params, state.work, block, hidden, members);
}

// Return the head and the query of a row of a tile, in the form that a score function takes.
CUFLASH_DEVICE attention::HeadAndQuery head_and_query(const attention::Params& params, const attention::WorkTile& work,
                                                      int row, const attention::QueryPosition<Config>& position,
                                                      attention::NoChosenLists) {
  static_assert(!kPackGqa || !Config::kIsPaged, "rows of several heads have no position in a cache");
  row = attention::Positions{work.first, work.last}.at(row);
  if (!kPackGqa) return {work.batch_head.head, position(row)};
  const attention::DivMod heads = attention::divmod(row, params.shape.seqlen_q);
  return {work.batch_head.head + heads.quotient, heads.remainder};
}
CUFLASH_DEVICE attention::HeadAndQuery head_and_query(const attention::Params&, const attention::WorkTile& work,
                                                      int row, const attention::QueryPosition<Config>&,
                                                      const attention::ChosenLists& chosen) {
  return attention::head_and_query_of_neighbours(chosen, work, row);
}

// Replace the scores of a step by the score function's results.
template <class Score>
CUFLASH_DEVICE void score_step(Scores& s, const attention::Params& params, const attention::WorkTile& work,
                               const attention::KvBlock& block, const Score& score,
                               attention::PagesArgument<Config> pages, attention::ChosenArgument<Config> chosen) {
  using namespace attention;
  const QueryPosition<Config> position(pages, work.batch_head.batch_index);
  const auto query_of = [&](int i) { return head_and_query(params, work, row_of(s, i), position, chosen); };
  apply_score(s, score, params.shape.softmax_scale, work.batch_head, query_of, {block.start, block.stop}, 1);
}

// Set dropped weights of a step to 0.
CUFLASH_DEVICE void drop_step(Scores& p, const attention::Params& params, const attention::WorkTile& work,
                              int first_key, attention::DropoutArgument<Config> dropout) {
  using namespace attention;
  if constexpr (!Config::kHasDropout) return;
  else if constexpr (!kPackGqa)
    drop_weights_of_queries(p, dropout, params.shape, work.batch_head, work.first, first_key);
  else drop_weights(p, kept_weights<Scores>(Draws(dropout), [&](int i, int j) {
    const DivMod heads = divmod(work.first + row_of(p, i), params.shape.seqlen_q);
    return WeightPosition{head_number(params.shape, work.batch_head, work.batch_head.head + heads.quotient),
                       heads.remainder, first_key + column_of(p, j)};
  }));
}

// Return the rows of this block's part in a workspace of partial results.
CUFLASH_DEVICE tile::StackedRows<float> rows_of_part(const attention::Shape& shape, const attention::Matrices& parts,
                                                     const attention::BatchHead& batch_head, int num_columns) {
  const int seqlen_q = shape.seqlen_q, first = attention::split_index(shape.num_splits) * seqlen_q;
  const auto all = attention::matrix<float>(parts, batch_head, batch_head.head, 0, num_columns);
  return {all.rows(first, first + seqlen_q), parts.head_stride, seqlen_q};
}

// Write the partial results of a block that shares its tile: lse of its keys, and O of the rows that see at least one
// of them.
template <class SplitParts>
CUFLASH_DEVICE void write_part(const attention::Params& params, const SplitParts& parts, const BlockState& state,
                               const Softmax& softmax, Output& o, attention::DropoutArgument<Config> dropout) {
  const attention::WorkTile& work = state.work;
  const auto lse_rows = rows_of_part(params.shape, parts.lse_parts, work.batch_head, 1);
  const auto o_rows = rows_of_part(params.shape, parts.o_parts, work.batch_head, kValueDim);
  float row_lse[Output::kRows];
  softmax.finalize(o, state.softmax_scale_log2, row_lse);
  if constexpr (Config::kHasDropout) o.scale(dropout.factor);
  ptx::cp_async_wait<0>();  // Q has arrived, even without a step
#pragma unroll
  for (int i = 0; i < o.kRows; ++i) {
    const int row = work.first + o.first_row() + o.row(i);
    if (row >= work.last) continue;
    if (o.first_column() == 0) *lse_rows.row(row) = row_lse[i];
    if (row_lse[i] != ptx::negative_infinity<float>()) tile::store_row(o_rows.row(row), o, i);
  }
}

// Return a function that returns the sink of a row of a tile by the row's index.
CUFLASH_DEVICE auto sink_of_rows(attention::SinkArgument<Config> sink, const attention::WorkTile& work,
                                 attention::NoChosenLists) {
  const float logit = attention::sink_logit<float>(sink, work.batch_head, work.batch_head.head);
  return [logit](int) { return logit; };
}
CUFLASH_DEVICE auto sink_of_rows(attention::SinkArgument<Config> sink, const attention::WorkTile& work,
                                 const attention::ChosenLists& chosen) {
  return [&](int row) {
    const int head = attention::head_and_query_of_neighbours(chosen, work, row).head;
    return attention::sink_logit<float>(sink, work.batch_head, head);
  };
}

// Write lse, and O through the shared memory of Q.
CUFLASH_DEVICE void write_results(const attention::Params& params, const BlockState& state, const Softmax& softmax,
                                  Output& o, attention::SinkArgument<Config> sink,
                                  attention::DropoutArgument<Config> dropout,
                                  attention::ChosenArgument<Config> chosen) {
  using namespace attention;
  const WorkTile& work = state.work;
  const auto lse = rows_of_tile<float>(chosen, params.lse, work, 1);
  const int first_row = o.first_row(), first_column = o.first_column();
  const auto logit_of = sink_of_rows(sink, work, chosen);
  float row_lse[Output::kRows];
  softmax.finalize(o, state.softmax_scale_log2, row_lse);
  if constexpr (Config::kHasDropout) o.scale(dropout.factor);
  if constexpr (Config::kHasSink)
#pragma unroll
    for (int i = 0; i < o.kRows; ++i) o.scale_row(i, merge_sink(row_lse[i], logit_of(first_row + o.row(i))));
#pragma unroll
  for (int i = 0; i < o.kRows; ++i)
    if (first_column == 0 && first_row + o.row(i) < lse.num_rows) lse.at(first_row + o.row(i), 0) = row_lse[i];
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q has arrived, even without a step, and all threads have read it
  tile::store(o_smem, o);
  __syncthreads();  // all of O is stored
  tile::store<kThreads>(rows_of_tile<Element>(chosen, params.o, work, params.shape.value_dim), o_smem);
}
constexpr int kSharedBytes = kStateOffset + static_cast<int>(sizeof(BlockState));

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_forward(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  auto& state = *reinterpret_cast<BlockState*>(ptx::dynamic_shared<unsigned char>() + kStateOffset);
  const WorkTile work = tile_of_block(params, pages, chosen);
  if (work.is_empty()) return;
  // computed first, since loads from a list have a high latency
  const VisitRange block_range = visit_range_of_block(params, work, chosen);
  load_q(params, work, chosen);
  if (threadIdx.x == 0) save_state(params, work, block_range, state);
  Softmax softmax;
  Output o;
  o.fill(0);
  __syncthreads();  // the state is stored
  Element* const k = state.k;
  Element* const v = state.v;
  const VisitRange visit_range = state.visit_range;
  const bool rows_fill_tiles = state.rows_fill_tiles;
  BlockIterator<kBlockKv, Walk, Listed> blocks(params, visit_range);
  KvBlock block;
  MembersOfTile members(chosen, work);
  bool has_block = blocks.next(block);
  if (has_block) members.read(block);
  if (has_block) load_block(k_smem, k, params.k, shape.head_dim, block, rows_fill_tiles, pages, state);
  ptx::cp_async_commit();
  while (has_block) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // K has arrived, and Q before the first step; all threads have read V of the last step
    load_block(v_smem, v, params.v, shape.value_dim, block, rows_fill_tiles, pages, state);
    ptx::cp_async_commit();
    Scores s;
    const bool is_visited = members.has_any();  // whether a query of the warp visits the block
    if (is_visited) tile::gemm_nt(s, q_smem, k_smem);
    ptx::cp_async_wait<0>();
    __syncthreads();  // V has arrived; all threads have read K
    if (is_visited) {
      if constexpr (kHasScore) score_step(s, params, state.work, block, score_function, pages, chosen);
      else if (Softmax::needs_negation(shape.softmax_scale)) Softmax::negate(s, shape.softmax_scale);
      if (!is_unmasked<kBlockKv>(block) || !members.has_all()) mask_block(s, params, state, block, members);
    }
    const int first_key = block.start;
    has_block = blocks.next(block);
    if (has_block) members.read(block);
    if (has_block) load_block(k_smem, k, params.k, shape.head_dim, block, rows_fill_tiles, pages, state);
    ptx::cp_async_commit();
    if (is_visited) {
      softmax.update(s, o, state.softmax_scale_log2);
      drop_step(s, params, state.work, first_key, dropout);
      tile::gemm_add_nn(o, s, v_smem);
    }
  }

  if constexpr (kIsSplit) write_part(params, parts, state, softmax, o, dropout);
  else write_results(params, state, softmax, o, sink, dropout, chosen);
}
