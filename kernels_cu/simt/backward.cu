// FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2) in a single walk over the scores. A thread block
// computes dK and dV of one tile of keys, and adds to dQ atomically, in no fixed order. Scores are transposed: rows are
// keys. Q, dO, Q again and the block's contribution to dQ take turns in one tile of shared memory; P and then dS use a
// second tile.
#include <attention/block_iterator.cuh>
#include <attention/config_simt.cuh>
#include <attention/dropout.cuh>
#include <attention/score_gradient.cuh>
#include <attention/score_slopes.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::simt {

constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
constexpr int kDqWidth = tile::kMmaRows > 0   ? 32
                         : kHeadDim % 64 == 0 ? 64
                                              : kHeadDim;  // number of columns of dQ in registers at a time
// Unrolled steps of a product. More steps gain little and lengthen compilation by half.
constexpr int kUnroll = 1;
// Unrolled steps of the product of scores: its accumulators leave registers for the operands of more steps.
constexpr int kScoreUnroll = tile::kMmaRows > 0 ? tile::kMmaUnroll : kUnroll;
// Padding of the rows of K and V. Multiply-adds read only along rows, in vectors, and need none; tensor cores also read
// along columns.
constexpr int kPadding = tile::kMmaRows > 0 ? tile::kPadding<Accumulator> : 0;
using KRows = tile::SharedTile<Accumulator, kBlockKv, kHeadDim, kHeadDim + kPadding>;
using VRows = tile::SharedTile<Accumulator, kBlockKv, kValueDim, kValueDim + kPadding>;
// If rows start 8 banks apart, four rows can be written at once without a bank conflict. With 64 queries, this padding
// does not fit in shared memory.
constexpr int kPtPadding = kPadding == 0 && kBlockQ > 64 ? 8 : kPadding;
using PtTile = tile::SharedTile<Accumulator, kBlockKv, kBlockQ, kBlockQ + kPtPadding>;

// Q, dO and dQ take turns in this tile; each row is followed by lse and delta of its query.
template <int Columns>
using SharedSlot = tile::SharedTile<Accumulator, kBlockQ, Columns, kWidest + tile::kPadding<Accumulator>>;
constexpr int kSharedBytes = kBytesOf<KRows, VRows, PtTile, SharedSlot<kHeadDim>>;

// In kernels with a score function or dropout: replace P^T (with a score function: S^T) by the weights that multiply
// dO, and dP^T by dS^T. `p` returns the element at a thread's row and column; `lse_2` and `delta_of` return the value
// of a column.
template <class POf, class Dp, class LseOf, class DeltaOf>
CUFLASH_DEVICE void make_changed_p_and_ds(POf p, Dp& dp, const attention::Params& params,
                                          const attention::WorkTile& work, const attention::KvBlock& block,
                                          LseOf lse_2, DeltaOf delta_of, const score::Function& score_function,
                                          attention::DropoutArgument<Config> dropout) {
  using namespace attention;
  KeptWeights<Dp> kept;
  if constexpr (Config::kHasDropout) {
    kept = kept_weights_of_keys(dp, dropout, params.shape, work, block);
    drop_gradients(dp, kept, static_cast<Accumulator>(dropout.factor));
  }
  if constexpr (kHasScore)
    scores_to_p_and_ds_of_keys(p, dp, score_function, params, work, block, lse_2, delta_of);
  else if constexpr (Config::kHasDropout)
    score_gradients_of_keys(dp, p, delta_of);
  if constexpr (Config::kHasDropout) drop_weights<Dp>(p, kept);
}

// Load K and V of a tile. Called by all threads.
CUFLASH_DEVICE void load_keys(const attention::Params& params, const attention::WorkTile& work, int kv_head,
                              KRows k_smem, VRows v_smem) {
  using namespace attention;
  const Shape& shape = params.shape;
  tile::load(k_smem, matrix<Element>(params.k, work.batch_head, kv_head, shape.seqlen_kv, shape.head_dim)
                         .rows(work.first, work.last));
  tile::load(v_smem, matrix<Element>(params.v, work.batch_head, kv_head, shape.seqlen_kv, shape.value_dim)
                         .rows(work.first, work.last));
}

}  // namespace cuflash::simt

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_backward(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::simt;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  WorkTile work = key_tile(params, kBlockKv);
  if (work.is_empty()) return;
  const int first_head = work.batch_head.head, kv_head = first_head / shape.group_size;

  Accumulator* const smem = ptx::dynamic_shared<Accumulator>();
  const KRows k_smem{smem};
  const VRows v_smem{k_smem.data + KRows::kElements};
  const PtTile p_smem{v_smem.data + VRows::kElements};  // P^T, then dS^T
  const SharedSlot<kHeadDim> q_smem{p_smem.data + PtTile::kElements};
  const SharedSlot<kValueDim> do_smem{q_smem.data};
  const SharedSlot<kHeadDim> dq_smem{q_smem.data};
  const auto lse_2 = [&](int row) { return q_smem.at(row, kWidest); };
  const auto delta_of = [&](int row) { return q_smem.at(row, kWidest + 1); };
  load_keys(params, work, kv_head, k_smem, v_smem);

  tile::RegisterTile<Accumulator, kBlockKv, kHeadDim, kRun> dk;
  tile::RegisterTile<Accumulator, kBlockKv, kValueDim, kRun> dv;
  dk.fill(0);
  dv.fill(0);
  for (int head = first_head; head < first_head + shape.group_size; ++head) {
    work.batch_head.head = head;
    const auto q = matrix<Element>(params.q, work.batch_head, head, shape.seqlen_q, shape.head_dim);
    const auto d_o = matrix<Element>(params.do_, work.batch_head, head, shape.seqlen_q, shape.value_dim);
    const auto dq = matrix<Accumulator>(params.dq, work.batch_head, head, shape.seqlen_q, shape.head_dim);
    const auto lse = matrix<Accumulator>(params.lse, work.batch_head, head, shape.seqlen_q, 1);
    const auto delta = matrix<Accumulator>(params.delta, work.batch_head, head, shape.seqlen_q, 1);
    const VisitRange visit_range = visit_range_of_keys(params, work);
    BlockIterator<kBlockQ, OverQBlocks> blocks(params, visit_range);
    for (KvBlock block; blocks.next(block);) {
      tile::RegisterTile<Accumulator, kBlockKv, kBlockQ> scores;  // S, then dP
      __syncthreads();  // all threads have read dQ and dS of the last step
      load_statistics<kWidest>(q_smem, block, lse, delta);
      tile::load(q_smem, q.rows(block.start, block.stop));
      __syncthreads();  // Q has arrived, and K and V before the first step
      scores.fill(0);
      tile::gemm_add_nt<kScoreUnroll>(scores, k_smem, q_smem);
      if constexpr (!kHasScore) probabilities_of_keys(scores, params, work, block, lse_2);
      tile::store(p_smem, scores);  // with a score function, S, which only its own thread reads
      __syncthreads();  // P is stored, and all threads have read Q
      // The gradients of a query without a key are 0, whatever its rows contain.
      tile::load(do_smem, d_o.rows(block.start, block.stop),
                 [&](int row) { return lse_2(row) != -ptx::negative_infinity<Accumulator>(); });
      __syncthreads();  // dO has arrived
      if constexpr (!kHasScore && !Config::kHasDropout) tile::gemm_add_nn<kUnroll>(dv, p_smem, do_smem);
      scores.fill(0);
      tile::gemm_add_nt<kScoreUnroll>(scores, v_smem, do_smem);
      const auto p_at = [&](int i, int j) -> Accumulator& { return p_smem.at(scores.row(i), scores.column(j)); };
      make_changed_p_and_ds(p_at, scores, params, work, block, lse_2, delta_of, score_function, dropout);
      if constexpr (kHasScore || Config::kHasDropout) {
        __syncthreads();  // P is stored
        tile::gemm_add_nn<kUnroll>(dv, p_smem, do_smem);
      }
      __syncthreads();  // all threads have read P and dO
      if constexpr (!kHasScore && !Config::kHasDropout) score_gradients_of_keys(scores, p_at, delta_of);
      tile::store(p_smem, scores);
      tile::load(q_smem, q.rows(block.start, block.stop));
      __syncthreads();  // dS is stored, and Q has arrived
      tile::gemm_add_nn<kUnroll>(dk, p_smem, q_smem);
      __syncthreads();  // all threads have read Q
      const Interval keys = visited_keys(params, work, block);
#pragma unroll 1
      for (int column = 0; column < kHeadDim; column += kDqWidth) {
        tile::RegisterTile<Accumulator, kBlockQ, kDqWidth, kRun> dq_frag;
        dq_frag.fill(0);
        tile::gemm_add_tn(dq_frag, p_smem, k_smem.columns<kDqWidth>(column), keys.lo, keys.hi);
        dq_frag.scale(shape.softmax_scale);
        tile::store(dq_smem.columns<kDqWidth>(column), dq_frag);
      }
      __syncthreads();  // dQ is stored
      tile::add(dq.rows(block.start, block.stop), dq_smem);
    }
  }
  dk.scale(shape.softmax_scale);
  if constexpr (Config::kHasDropout) dv.scale(dropout.factor);
  store_gradient<Element>(params.dk, work, kv_head, shape.seqlen_kv, shape.head_dim, dk);
  store_gradient<Element>(params.dv, work, kv_head, shape.seqlen_kv, shape.value_dim, dv);
}
