// The rows' half of FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2), where every result must repeat bit
// for bit: dQ of one tile of queries, P recomputed from lse. Each warp keeps its rows of P, dS and dQ in registers.
#include <attention/fragment_gradient.cuh>
#include <attention/fragment_slopes.cuh>
#include <attention/mma_gradient.cuh>
#include <ptx/cp_async.cuh>

namespace cuflash {

using config::kNumStages;

constexpr int kRowTiles = kBlockQ / (16 * kNumWarps);
using Scores = tile::WarpTile<kRowTiles, kBlockKv / 8, kNumWarps>;
using Gradient = tile::WarpTile<kRowTiles, kHeadDim / 8, kNumWarps>;

constexpr QTile q_smem{0};
constexpr OTile do_smem{QTile::kBytes};
constexpr int kK = do_smem.start + OTile::kBytes;  // stages of K, then of V
constexpr int kV = kK + kNumStages * KTile::kBytes;
constexpr int kKept = kV + kNumStages * VTile::kBytes;

// What a block remembers of its tile in shared memory: registers are for accumulators.
struct Kept {
  Element* k;
  Element* v;
  attention::WorkTile work;
  attention::Reach reach;
  float softmax_scale_log2;
  bool has_rows;  // K's and V's are those of their tiles
};

CUFLASH_DEVICE void load_step(const attention::Params& params, const Kept& kept, const attention::Step& step, int stage) {
  const attention::Shape& shape = params.shape;
  if (__builtin_expect(kept.has_rows && step.stop - step.start == kBlockKv, true)) {
    const int64_t k_stride = params.k.row_stride, v_stride = params.v.row_stride;
    const tile::WholeRows<kThreads, Element, kBlockKv, kHeadDim> k({kK + stage * KTile::kBytes},
                                                                   kept.k + step.start * k_stride, k_stride);
    const tile::WholeRows<kThreads, Element, kBlockKv, kValueDim> v({kV + stage * VTile::kBytes},
                                                                    kept.v + step.start * v_stride, v_stride);
    k.start();
    v.start();
    return;
  }
  tile::load_async<kThreads, false>(KTile{kK + stage * KTile::kBytes},
                                    rows(kept.k, params.k, shape.head_dim, step.start, step.stop));
  tile::load_async<kThreads, false>(VTile{kV + stage * VTile::kBytes},
                                    rows(kept.v, params.v, shape.value_dim, step.start, step.stop));
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm80_backward_rows(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile<Listed>(params, kBlockQ);
  if (work.is_empty()) return;
  const Place& place = work.place;
  const Reach reach = reach_of_queries(params, work);  // first: a list takes time to answer
  tile::load_async<kThreads>(q_smem, matrix<Element>(params.q, place, place.head, shape.seqlen_q, shape.head_dim)
                                         .rows(work.first, work.last));
  tile::load_async<kThreads>(do_smem, matrix<Element>(params.do_, place, place.head, shape.seqlen_q, shape.value_dim)
                                          .rows(work.first, work.last));
  auto& kept = *reinterpret_cast<Kept*>(ptx::dynamic_shared<unsigned char>() + kKept);
  if (threadIdx.x == 0) {
    const int kv_head = divided(place.head, shape.group_size).quotient;
    kept.work = work;
    kept.softmax_scale_log2 = shape.softmax_scale * kLog2E;
    kept.reach = reach;
    kept.k = matrix<Element>(params.k, place, kv_head, 0, 0).data;
    kept.v = matrix<Element>(params.v, place, kv_head, 0, 0).data;
    kept.has_rows =
        has_rows_of<KTile>(kept.k, params.k, shape.head_dim) && has_rows_of<VTile>(kept.v, params.v, shape.value_dim);
  }

  const auto row = row_statistics<Scores>(
      matrix<float>(params.lse, place, place.head, shape.seqlen_q, 1).rows(work.first, work.last),
      matrix<float>(params.delta, place, place.head, shape.seqlen_q, 1).rows(work.first, work.last));
  Gradient dq;
  dq.fill(0);
  __syncthreads();  // what is kept is there
  Steps<kBlockKv, OverKeys, Listed> steps(params, kept.reach);
  Step step, next;
  bool has_step = steps.next(step);
  if (has_step) load_step(params, kept, step, 0);
  ptx::cp_async_commit();
  bool has_next = steps.next(next);  // one ahead: what a list says of it arrives while this one is worked on
  for (int stage = 0; has_step; stage = kNumStages - 1 - stage) {
    const KTile k_smem{kK + stage * KTile::kBytes};
    const VTile v_smem{kV + stage * VTile::kBytes};
    ptx::cp_async_wait<0>();
    __syncthreads();  // K and V, and Q and dO before the first step, are there; K and V of the last step are read
    if (kNumStages == 2 && has_next) load_step(params, kept, next, 1 - stage);
    ptx::cp_async_commit();
    Scores s, dp;
    tile::product_nt(s, q_smem, k_smem);
    tile::product_nt(dp, do_smem, v_smem);
    if constexpr (kHasScore) {
      const bool is_masked = !is_whole<kBlockKv>(step);
      if (is_masked) mask_scores<config::kIsListed>(s, params, kept.work, step, masked_score());
      score_pairs_of_rows(s, dp, score_function, shape, kept.work.place, {kept.work.first, kept.work.last},
                          {step.start, step.stop}, is_masked, row, true);
    } else if (is_whole<kBlockKv>(step)) {
      score_gradients<false>(s, dp, kept.softmax_scale_log2, row);
    } else {
      mask_scores<config::kIsListed>(s, params, kept.work, step, masked_score());
      score_gradients<true>(s, dp, kept.softmax_scale_log2, row);
    }
    tile::add_product_nn(dq, dp, k_smem);
    if (kNumStages == 1) {
      __syncthreads();  // K and V are read
      if (has_next) load_step(params, kept, next, 0);
      ptx::cp_async_commit();
    }
    step = next;
    has_step = has_next;
    has_next = steps.next(next);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q is there, even without a step, and read
  dq.scale(shape.softmax_scale);
  write_gradient(params.dq, kept.work, kept.work.place.head, shape.head_dim, q_smem, dq);
}
