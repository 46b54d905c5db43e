// FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2) on the tensor cores of Ampere: a block keeps a tile
// of keys and walks the queries that visit it, over the query heads that share it. dK and dV stay in registers; what a
// step adds to dQ goes to global memory, unless dQ has a kernel of its own (backward_rows.cu).
#include <attention/fragment_gradient.cuh>
#include <attention/fragment_slopes.cuh>
#include <attention/mma_gradient.cuh>
#include <ptx/cp_async.cuh>

namespace cuflash {

using config::kNumStages;

using ScoreShare = tile::Share<kBlockQ, kBlockKv, kNumWarps>;
using Scores = ScoreShare::Tile;
using DkOfWarp = tile::Share<kBlockKv, kHeadDim, kNumWarps>::Tile;
using DvOfWarp = tile::Share<kBlockKv, kValueDim, kNumWarps>::Tile;

constexpr bool kIsNarrow = kHeadDim + kValueDim <= 256;
constexpr int kNumScores = Scores::kRows * Scores::kColumns;  // of a thread
// Of 16-bit elements, and where registers suffice for both.
constexpr bool kMakesPMeanwhile = sizeof(Element) == 2 && kNumScores <= 32;
// Where products are long enough as well, P is also stored while dP is made, and dS while dV is, for one barrier more.
constexpr bool kMakesDsMeanwhile =
    kMakesPMeanwhile && !kIsNarrow && kValueDim >= 64 && ScoreShare::kHolders == kNumWarps;
// Where registers do not suffice, P and dS are rounded, to half as many, before whole and other steps go on alike.
constexpr bool kStoresApart = kMakesDsMeanwhile || (sizeof(Element) == 2 && kNumScores > 32);
// Where all warps hold scores of their own the question is for ptxas, which orders what follows it better: 2 % of the
// gradients of 128 columns without a list.
constexpr bool kAsksWhoHolds = ScoreShare::kHolders < kNumWarps || (!config::kIsListed && kNumScores <= 32);

constexpr KTile k_smem{0};
constexpr VTile v_smem{KTile::kBytes};
constexpr int kQ = v_smem.start + VTile::kBytes;  // stages of Q, then of dO
constexpr int kDo = kQ + kNumStages * QTile::kBytes;
constexpr PTile p_smem{kDo + kNumStages * OTile::kBytes};
constexpr PTile ds_smem{p_smem.start + PTile::kBytes};
constexpr int kStatistics = ds_smem.start + PTile::kBytes;  // stages of lse and delta
constexpr int kKept = kStatistics + kNumStages * 2 * kBlockQ * static_cast<int>(sizeof(float));

// What a block remembers of its tile and the head at hand in shared memory: registers are for accumulators.
struct Kept {
  attention::WorkTile work;
  attention::Reach reach;
  float softmax_scale_log2;
  bool has_rows;  // Q's and dO's are those of their tiles
  Element* q;
  Element* d_o;
  float* lse;
  float* delta;
  float* dq_sum;
};

// Start to copy K, as far as some query of the head may see it: what stands at other keys must not reach dQ, where it
// would meet a dS of 0.
CUFLASH_DEVICE void load_k(const attention::Params& params, const attention::WorkTile& work) {
  using namespace attention;
  const Shape& shape = params.shape;
  const int head = divided(work.place.head, shape.group_size).quotient;
  const int first = interval(params, work.place, 0).lo, last = interval(params, work.place, shape.seqlen_q - 1).hi;
  const auto k = matrix<Element>(params.k, work.place, head, shape.seqlen_kv, shape.head_dim);
  const auto seen = k.rows(work.first, max(work.first, min(work.last, last)));
  tile::load_async<kThreads>(k_smem, seen, first - work.first);
}

// The queries of the head at hand that may visit the tile.
CUFLASH_DEVICE attention::Reach reach_of_head(const attention::Params& params, const attention::WorkTile& work) {
  return attention::from_whole_tiles(params, attention::reach_of_keys(params, work), kBlockQ);
}

// Note how far its queries reach, and where they lie. By one thread.
CUFLASH_DEVICE void keep_head(const attention::Params& params, const attention::Place& place, const attention::Reach& reach,
                              Kept& kept) {
  using attention::matrix;
  kept.reach = reach;
  kept.q = matrix<Element>(params.q, place, place.head, 0, 0).data;
  kept.d_o = matrix<Element>(params.do_, place, place.head, 0, 0).data;
  kept.lse = matrix<float>(params.lse, place, place.head, 0, 0).data;
  kept.delta = matrix<float>(params.delta, place, place.head, 0, 0).data;
  kept.dq_sum = matrix<float>(params.dq_sum, place, place.head, 0, 0).data;
  kept.has_rows = has_rows_of<QTile>(kept.q, params.q, params.shape.head_dim) &&
                  has_rows_of<OTile>(kept.d_o, params.do_, params.shape.value_dim);
}

// Note where the tile lies, and start to copy K and V. False where the tile is empty.
CUFLASH_DEVICE bool begin(const attention::Params& params, Kept& kept) {
  using namespace attention;
  const Shape& shape = params.shape;
  const WorkTile work = key_tile<Listed>(params, kBlockKv);
  if (work.is_empty()) return false;
  const Reach reach = reach_of_head(params, work);  // first: a list takes time to answer
  const int kv_head = divided(work.place.head, shape.group_size).quotient;
  const auto v = matrix<Element>(params.v, work.place, kv_head, shape.seqlen_kv, shape.value_dim);
  load_k(params, work);
  tile::load_async<kThreads>(v_smem, v.rows(work.first, work.last));
  if (threadIdx.x == 0) {
    kept.work = work;
    kept.softmax_scale_log2 = shape.softmax_scale * kLog2E;
    keep_head(params, work.place, reach, kept);
  }
  return true;
}

// Go on to the next head that shares the keys.
CUFLASH_DEVICE void begin_next_head(const attention::Params& params, Kept& kept) {
  __syncthreads();  // what was kept of the last head is read
  if (threadIdx.x == 0) {
    ++kept.work.place.head;
    keep_head(params, kept.work.place, reach_of_head(params, kept.work), kept);
  }
}

// lse, or delta, of a stage's queries.
CUFLASH_DEVICE tile::Matrix<float> statistics(int stage, int which, int num_rows) {
  float* const all = reinterpret_cast<float*>(ptx::dynamic_shared<unsigned char>() + kStatistics);
  return {all + (2 * stage + which) * kBlockQ, 1, 1, num_rows, 1};
}

// As many queries as a tile has, of rows that are those of the tiles. Where registers suffice, all addresses are reckoned first.
CUFLASH_DEVICE void load_whole_step(const attention::Params& params, const Kept& kept, int first, int stage) {
  using QRows = tile::WholeRows<kThreads, Element, kBlockQ, kHeadDim>;
  using DoRows = tile::WholeRows<kThreads, Element, kBlockQ, kValueDim>;
  constexpr int kKnown = (2 * kBlockQ + kThreads - 1) / kThreads;  // numbers of lse and delta that a thread copies
  const auto place_of_known = [&](int number) {
    const bool is_lse = number < kBlockQ;
    const float* const column = is_lse ? kept.lse : kept.delta;
    return column + (first + number % kBlockQ) * (is_lse ? params.lse.row_stride : params.delta.row_stride);
  };
  const float* known = kIsNarrow ? place_of_known(threadIdx.x) : nullptr;
  const QRows q({kQ + stage * QTile::kBytes}, kept.q + first * params.q.row_stride, params.q.row_stride);
  if (!kIsNarrow) q.start();
  const DoRows d_o({kDo + stage * OTile::kBytes}, kept.d_o + first * params.do_.row_stride, params.do_.row_stride);
  if (kIsNarrow) q.start();
  d_o.start();
#pragma unroll
  for (int i = 0; i < kKnown; ++i) {
    const int number = threadIdx.x + i * kThreads;
    if (!kIsNarrow || i > 0) known = place_of_known(number);
    if (number < 2 * kBlockQ) ptx::cp_async_ca_4(ptx::shared_address(&statistics(stage, 0, 0).at(number, 0)), known, 4);
  }
}

// Fewer, or of other rows.
CUFLASH_DEVICE void load_any_step(const attention::Params& params, const Kept& kept, const attention::Step& step,
                                  int stage) {
  const attention::Shape& shape = params.shape;
  tile::load_async<kThreads, false>(QTile{kQ + stage * QTile::kBytes},
                                    rows(kept.q, params.q, shape.head_dim, step.start, step.stop));
  tile::load_async<kThreads, false>(OTile{kDo + stage * OTile::kBytes},
                                    rows(kept.d_o, params.do_, shape.value_dim, step.start, step.stop));
  const int num_rows = step.stop - step.start;
  tile::load_async<kThreads>(statistics(stage, 0, num_rows), rows(kept.lse, params.lse, 1, step.start, step.stop));
  tile::load_async<kThreads>(statistics(stage, 1, num_rows), rows(kept.delta, params.delta, 1, step.start, step.stop));
}

// The step, if there is one.
CUFLASH_DEVICE void load_step(const attention::Params& params, const Kept& kept, bool is_there, const attention::Step& step,
                              int stage) {
  const bool is_whole = is_there & kept.has_rows & (step.stop - step.start == kBlockQ);  // with && ptxas spills
  if (is_there && !is_whole) load_any_step(params, kept, step, stage);
  if (__builtin_expect(is_whole, true)) load_whole_step(params, kept, step.start, stage);
}

// Set what the tile's keys are hidden from in a step to `masked_score`.
CUFLASH_DEVICE void mask_step(Scores& s, const attention::Params& params, const attention::WorkTile& work,
                              const attention::Step& step) {
  const attention::WorkTile queries{work.place, step.start, step.stop};
  const attention::Step keys{work.first, work.last, step.kind, step.entry};
  attention::mask_scores<config::kIsListed>(s, params, queries, keys, attention::masked_score());
}

// Put P and dS into shared memory.
CUFLASH_DEVICE void store_scores(const Scores& p, const Scores& ds) {
  if (kAsksWhoHolds && !Scores::is_first_holder()) return;
  tile::store(p_smem, p);
  tile::store(ds_smem, ds);
}

// P and dS of S, all of which is allowed: P is made and stored while dP = dO V^T is, and dS while dV += P^T dO.
template <class Row>
CUFLASH_DEVICE void add_dv_meanwhile(DvOfWarp& dv, Scores& s, OTile do_smem, float softmax_scale_log2, const Row& row) {
  constexpr int kTurns = kBlockQ / 16;
  Scores dp;
  attention::probabilities_meanwhile(s, dp, do_smem, v_smem, softmax_scale_log2, row,
                                     [&](int column_tile) { tile::store_columns(p_smem, s, column_tile); });
  __syncthreads();  // P is there
  tile::add_product_tn(dv, p_smem, do_smem, [&](int turn) {
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
      if (j * kTurns / Scores::kColumnTiles != turn) continue;
      attention::score_gradient_columns(dp, s, row, j);
      tile::store_columns(ds_smem, dp, j);
    }
  });
}

// Whatever a query without a key brings, its gradients are 0. Called by all threads.
CUFLASH_DEVICE void clear_empty_rows(OTile d_o, const tile::Matrix<float>& lse) {
  for (int row = threadIdx.x; row < lse.num_rows; row += kThreads)
    if (lse.at(row, 0) == ptx::negative_infinity<float>())
      for (int chunk = 0; chunk < OTile::kChunks; ++chunk)
        *d_o.pointer<tile::Chunk<Element>>(OTile::offset(row, chunk)) = {};
  __syncthreads();
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm80_backward(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  auto& kept = *reinterpret_cast<Kept*>(ptx::dynamic_shared<unsigned char>() + kKept);
  if (!begin(params, kept)) return;
  DkOfWarp dk;
  DvOfWarp dv;
  dk.fill(0);
  dv.fill(0);
  for (int head = 0; head < shape.group_size; ++head) {
    if (head > 0) begin_next_head(params, kept);
    __syncthreads();  // what is kept is there
    if (head > 0 && params.work.interval_head_stride != 0) load_k(params, kept.work);  // heads see other keys
    Steps<kBlockQ, OverQueries, Listed> steps(params, kept.reach);
    Step step, next;
    bool has_step = steps.next(step);
    load_step(params, kept, has_step, step, 0);
    ptx::cp_async_commit();
    bool has_next = steps.next(next);  // one ahead: what a list says of it arrives while this one is worked on
    for (int stage = 0; has_step; stage = kNumStages - 1 - stage) {
      const QTile q_smem{kQ + stage * QTile::kBytes};
      const OTile do_smem{kDo + stage * OTile::kBytes};
      const auto lse = statistics(stage, 0, step.stop - step.start), delta = statistics(stage, 1, step.stop - step.start);
      ptx::cp_async_wait<0>();
      __syncthreads();  // Q and dO, and K and V before the first step, are there; P and dS of the last step are read
      if (kNumStages == 2) load_step(params, kept, has_next, next, 1 - stage);
      ptx::cp_async_commit();

      Scores s, dp;
      tile::product_nt(s, q_smem, k_smem);
      if (!kHasScore && step.kind == Kind::kFull && kept.work.last - kept.work.first == kBlockKv) {
        const auto row = row_statistics<Scores>(lse, delta);
        const float softmax_scale_log2 = kept.softmax_scale_log2;
        if constexpr (kMakesDsMeanwhile) {
          add_dv_meanwhile(dv, s, do_smem, softmax_scale_log2, row);
        } else if constexpr (kMakesPMeanwhile) {
          probabilities_meanwhile(s, dp, do_smem, v_smem, softmax_scale_log2, row);
#pragma unroll
          for (int j = 0; j < Scores::kColumnTiles; ++j) score_gradient_columns(dp, s, row, j);
        } else {
          tile::product_nt(dp, do_smem, v_smem);
          score_gradients<false>(s, dp, softmax_scale_log2, row);
          if (kStoresApart) store_scores(s, dp);
        }
      } else {
        const bool is_masked =
            !kHasScore || step.kind != Kind::kFull || kept.work.last - kept.work.first != kBlockKv;
        if (is_masked) mask_step(s, params, kept.work, step);
        clear_empty_rows(do_smem, lse);
        tile::product_nt(dp, do_smem, v_smem);
        if constexpr (kHasScore) {
          score_pairs_of_rows(s, dp, score_function, shape, kept.work.place, {step.start, step.stop},
                              {kept.work.first, kept.work.last}, is_masked, row_statistics<Scores>(lse, delta),
                              Scores::is_first_holder());
        } else {
          score_gradients<true>(s, dp, kept.softmax_scale_log2, row_statistics<Scores>(lse, delta));
        }
        if (kStoresApart) store_scores(s, dp);
        if (kMakesDsMeanwhile) {
          __syncthreads();  // P is there
          tile::add_product_tn(dv, p_smem, do_smem);
        }
      }
      if (!kStoresApart) store_scores(s, dp);
      __syncthreads();  // P and dS are there
      if (!kMakesDsMeanwhile) tile::add_product_tn(dv, p_smem, do_smem);
      if (config::kDqAdds > 0) {
        DqOfWarp dq;
        tile::product_nn(dq, ds_smem, k_smem);
        DqSum(kept.dq_sum + query_tile_number(params, step.start, kBlockQ) * params.dq_sum.row_stride).add(dq);
      }
      tile::add_product_tn(dk, ds_smem, q_smem);
      if (kNumStages == 1) {
        __syncthreads();  // Q and dO are read
        load_step(params, kept, has_next, next, 0);
        ptx::cp_async_commit();
      }
      step = next;
      has_step = has_next;
      has_next = steps.next(next);
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // K and V are there, even without a step, and read
  const int kv_head = divided(kept.work.place.head, shape.group_size).quotient;
  dk.scale(shape.softmax_scale);
  hold_gradient(params.dk, kept.work, kv_head, shape.head_dim, k_smem, dk);
  hold_gradient(params.dv, kept.work, kv_head, shape.value_dim, v_smem, dv);
  __syncthreads();  // all of both is there
  write_held(params.dk, kept.work, kv_head, shape.head_dim, k_smem);
  write_held(params.dv, kept.work, kv_head, shape.value_dim, v_smem);
}
