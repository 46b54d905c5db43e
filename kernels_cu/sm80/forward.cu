// FlashAttention-2's forward pass (arXiv 2307.08691, algorithm 1) on the tensor cores of Ampere: a block works on one
// tile of queries and walks their keys; each warp keeps its rows of S, P and O in registers. K of the next step is
// copied while this one's softmax runs, V while its scores are multiplied.
// Where tiles are too few for the chip, several blocks share a tile's keys, and combine.cu merges what they leave;
// where queries are few too, a tile holds those of all the heads that share keys.
#include <attention/mma_operands.cuh>
#include <attention/score.cuh>
#include <attention/sink.cuh>
#include <ptx/cp_async.cuh>

namespace cuflash {

using config::kIsPacked;
using config::kIsSplit;

constexpr int kRowTiles = kBlockQ / (16 * kNumWarps);
using Scores = tile::WarpTile<kRowTiles, kBlockKv / 8, kNumWarps>;
using Output = tile::WarpTile<kRowTiles, kValueDim / 8, kNumWarps>;
using Softmax = attention::LazySoftmax<Scores::kRows>;

constexpr QTile q_smem{0};
constexpr OTile o_smem{0};  // in Q's place, once that is read
constexpr KTile k_smem{QTile::kBytes > OTile::kBytes ? QTile::kBytes : OTile::kBytes};
constexpr VTile v_smem{k_smem.start + KTile::kBytes};
constexpr int kKept = v_smem.start + VTile::kBytes;

// What a block remembers of its tile in shared memory: registers are for accumulators.
struct Kept {
  Element* k;
  Element* v;
  attention::WorkTile work;
  attention::Reach reach;
  float softmax_scale_log2;
  bool has_rows;  // K's and V's are those of their tiles
};

// The tile that a block works on, alone or with others.
CUFLASH_DEVICE attention::WorkTile tile_of_block(const attention::Params& params) {
  if (kIsPacked) return attention::packed_query_tile(params, kBlockQ, params.shape.num_splits);
  return attention::query_tile<Listed>(params, kBlockQ, kIsSplit ? params.shape.num_splits : 1);
}

// What the block visits of the keys that the tile's queries reach.
CUFLASH_DEVICE attention::Reach reach_of_block(const attention::Params& params, attention::WorkTile work) {
  using namespace attention;
  if (kIsPacked) work.last = params.shape.seqlen_q;  // each head's queries are the same
  const Reach whole = reach_of_queries(params, work);
  const int num_splits = params.shape.num_splits;
  return kIsSplit ? part_of<kBlockKv, Listed>(params, whole, work_part(num_splits), num_splits) : whole;
}

// Start to copy Q.
CUFLASH_DEVICE void load_q(const attention::Params& params, const attention::WorkTile& work) {
  const attention::Shape& shape = params.shape;
  const auto q = attention::matrix<Element>(params.q, work.place, work.place.head, shape.seqlen_q, shape.head_dim);
  if (kIsPacked) tile::load_async<kThreads>(q_smem, tile::RowsOfMatrices<Element>{q, params.q.head_stride, work.last});
  else tile::load_async<kThreads>(q_smem, q.rows(work.first, work.last));
}

// Note where the tile lies, and K and V. By one thread.
CUFLASH_DEVICE void keep(const attention::Params& params, const attention::WorkTile& work, const attention::Reach& reach,
                         Kept& kept) {
  using namespace attention;
  const Shape& shape = params.shape;
  const int kv_head = divided(work.place.head, shape.group_size).quotient;
  kept.k = matrix<Element>(params.k, work.place, kv_head, 0, 0).data;
  kept.v = matrix<Element>(params.v, work.place, kv_head, 0, 0).data;
  kept.work = work;
  kept.reach = reach;
  kept.softmax_scale_log2 = Softmax::scale_log2(exponent_scale(shape));
  kept.has_rows =
      has_rows_of<KTile>(kept.k, params.k, shape.head_dim) && has_rows_of<VTile>(kept.v, params.v, shape.value_dim);
}

// A step's rows of K, or of V.
template <class Tile>
CUFLASH_DEVICE void load_step(Tile to, Element* data, const attention::Matrices& matrices, int num_columns,
                              const attention::Step& step, bool has_rows) {
  if (__builtin_expect(has_rows && step.stop - step.start == kBlockKv, true)) {
    const int64_t row_stride = matrices.row_stride;
    tile::WholeRows<kThreads, Element, kBlockKv, Tile::kChunks * Tile::kChunk>(to, data + step.start * row_stride, row_stride)
        .start();
  } else {
    tile::load_async<kThreads, false>(to, rows(data, matrices, num_columns, step.start, step.stop));
  }
}

CUFLASH_DEVICE void mask_step(Scores& s, const attention::Params& params, const Kept& kept,
                              const attention::Step& step) {
  using namespace attention;
  const float hidden = ptx::negative_infinity<float>();
  if (kIsPacked) mask_scores<false>(s, params, kept.work, step, hidden, HeadAfterHead{params.shape.seqlen_q});
  else mask_scores<config::kIsListed>(s, params, kept.work, step, hidden);
}

// The score function of a step's scores, in their place.
template <class Score>
CUFLASH_DEVICE void score_step(Scores& s, const attention::Params& params, const attention::WorkTile& work,
                               const attention::Step& step, const Score& score) {
  using namespace attention;
  const Positions rows{work.first, work.last};
  const auto query_of = [&](int i) {
    const int row = rows.at(row_of(s, i));
    if (!kIsPacked) return HeadAndQuery{work.place.head, row};
    const Divided heads = divided(row, params.shape.seqlen_q);
    return HeadAndQuery{work.place.head + heads.quotient, heads.rest};
  };
  apply_score(s, score, params.shape, work.place, query_of, {step.start, step.stop}, 1);
}

// A part's rows of what is left to be merged.
CUFLASH_DEVICE tile::RowsOfMatrices<float> rows_of_part(const attention::Shape& shape, const attention::Matrices& parts,
                                                        const attention::Place& place, int num_columns) {
  const int seqlen_q = shape.seqlen_q, first = attention::work_part(shape.num_splits) * seqlen_q;
  const auto all = attention::matrix<float>(parts, place, place.head, 0, num_columns);
  return {all.rows(first, first + seqlen_q), parts.head_stride, seqlen_q};
}

// What a block that shares its tile leaves: O and lse of its keys; of rows that see none of them, lse alone.
CUFLASH_DEVICE void write_part(const attention::Params& params, const Kept& kept, const Softmax& softmax, Output& o) {
  const attention::WorkTile& work = kept.work;
  const auto lse_rows = rows_of_part(params.shape, params.parts.lse_parts, work.place, 1);
  const auto o_rows = rows_of_part(params.shape, params.parts.o_parts, work.place, kValueDim);
  float row_lse[Output::kRows];
  softmax.finalize(o, kept.softmax_scale_log2, row_lse);
  ptx::cp_async_wait<0>();  // Q is there, even without a step
#pragma unroll
  for (int i = 0; i < o.kRows; ++i) {
    const int row = work.first + o.first_row() + o.row(i);
    if (row >= work.last) continue;
    if (o.first_column() == 0) *lse_rows.row(row) = row_lse[i];
    if (row_lse[i] != ptx::negative_infinity<float>()) tile::store_row(o_rows.row(row), o, i);
  }
}

// lse, and O by way of Q's room.
CUFLASH_DEVICE void write_results(const attention::Params& params, const Kept& kept, const Softmax& softmax, Output& o,
                                  attention::SinkArgument sink) {
  using namespace attention;
  const WorkTile& work = kept.work;
  const Place& place = work.place;
  const int length = params.shape.seqlen_q;
  const auto lse = matrix<float>(params.lse, place, place.head, length, 1).rows(work.first, work.last);
  const int first_row = o.first_row(), first_column = o.first_column();
  const float logit = sink_logit<float>(sink, place, place.head);
  float row_lse[Output::kRows];
  softmax.finalize(o, kept.softmax_scale_log2, row_lse);
  if constexpr (config::kHasSink)
#pragma unroll
    for (int i = 0; i < o.kRows; ++i) o.scale_row(i, merge_sink(row_lse[i], logit));
#pragma unroll
  for (int i = 0; i < o.kRows; ++i)
    if (first_column == 0 && first_row + o.row(i) < lse.num_rows) lse.at(first_row + o.row(i), 0) = row_lse[i];
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q is there, even without a step, and read
  tile::store(o_smem, o);
  __syncthreads();  // O is there
  const auto all = matrix<Element>(params.o, place, place.head, length, params.shape.value_dim);
  tile::store<kThreads>(all.rows(work.first, work.last), o_smem);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm80_forward(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  auto& kept = *reinterpret_cast<Kept*>(ptx::dynamic_shared<unsigned char>() + kKept);
  const WorkTile work = tile_of_block(params);
  if (work.is_empty()) return;
  const Reach asked = reach_of_block(params, work);  // first: a list takes time to answer
  load_q(params, work);
  if (threadIdx.x == 0) keep(params, work, asked, kept);
  Softmax softmax;
  Output o;
  o.fill(0);
  __syncthreads();  // what is kept is there
  Element* const k = kept.k;
  Element* const v = kept.v;
  const Reach reach = kept.reach;
  const bool has_rows = kept.has_rows;
  Steps<kBlockKv, OverKeys, Listed> steps(params, reach);
  Step step;
  bool has_step = steps.next(step);
  if (has_step) load_step(k_smem, k, params.k, shape.head_dim, step, has_rows);
  ptx::cp_async_commit();
  while (has_step) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // K, and Q before the first step, is there; V of the last step is read
    load_step(v_smem, v, params.v, shape.value_dim, step, has_rows);
    ptx::cp_async_commit();
    Scores s;
    tile::product_nt(s, q_smem, k_smem);
    ptx::cp_async_wait<0>();
    __syncthreads();  // V is there; K is read
    if constexpr (kHasScore) score_step(s, params, kept.work, step, score_function);
    else if (Softmax::turns(shape.softmax_scale)) Softmax::turn(s, shape.softmax_scale);
    if (!is_whole<kBlockKv>(step)) mask_step(s, params, kept, step);
    has_step = steps.next(step);
    if (has_step) load_step(k_smem, k, params.k, shape.head_dim, step, has_rows);
    ptx::cp_async_commit();
    softmax.update(s, o, kept.softmax_scale_log2);
    tile::add_product_nn(o, s, v_smem);
  }

  if (kIsSplit) write_part(params, kept, softmax, o);
  else write_results(params, kept, softmax, o, sink);
}
