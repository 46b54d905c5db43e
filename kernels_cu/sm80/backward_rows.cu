// dQ of FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2), for calls whose results must be bitwise
// reproducible. A thread block computes dQ of one tile of queries and recomputes P from lse. Each warp keeps its rows
// of P, dS and dQ in registers.
#include <attention/dropout_gradient_mma.cuh>
#include <attention/epilogue_mma.cuh>
#include <attention/fragment_slopes.cuh>
#include <attention/members_gradient.cuh>
#include <attention/members_slopes.cuh>
#include <attention/score_gradient_mma.cuh>
#include <ptx/cp_async.cuh>
#include <sm80/block_state.cuh>

namespace cuflash::sm80 {

constexpr int kNumStages = Config::kNumStages;

constexpr int kRowTiles = kBlockQ / (16 * kNumWarps);
using Scores = tile::WarpTile<kRowTiles, kBlockKv / 8, kNumWarps>;
using Dq = tile::WarpTile<kRowTiles, kHeadDim / 8, kNumWarps>;
using Walk = tile::Conditional<Config::kPacksQueries, attention::OverUnions, attention::OverKvBlocks>;
using MembersOfTile = attention::MembersOf<Config, Scores>;

constexpr QTile q_smem{0};
constexpr OTile do_smem{QTile::kBytes};
constexpr int kKOffset = do_smem.start + OTile::kBytes;  // stages of K, followed by the stages of V
constexpr int kVOffset = kKOffset + kNumStages * KTile::kBytes;
constexpr int kStateOffset = kVOffset + kNumStages * VTile::kBytes;

CUFLASH_DEVICE void load_block(const attention::Params& params, const BlockState& state,
                               const attention::KvBlock& block, int stage) {
  const attention::Shape& shape = params.shape;
  if (__builtin_expect(state.rows_fill_tiles && block.stop - block.start == kBlockKv, true)) {
    const int64_t k_stride = params.k.row_stride, v_stride = params.v.row_stride;
    const tile::FullTileCopy<kThreads, Element, kBlockKv, kHeadDim> k({kKOffset + stage * KTile::kBytes},
                                                                      state.k + block.start * k_stride, k_stride);
    const tile::FullTileCopy<kThreads, Element, kBlockKv, kValueDim> v({kVOffset + stage * VTile::kBytes},
                                                                       state.v + block.start * v_stride, v_stride);
    k.start();
    v.start();
    return;
  }
  tile::load_async<kThreads, false>(KTile{kKOffset + stage * KTile::kBytes},
                                    rows(state.k, params.k, shape.head_dim, block.start, block.stop));
  tile::load_async<kThreads, false>(VTile{kVOffset + stage * VTile::kBytes},
                                    rows(state.v, params.v, shape.value_dim, block.start, block.stop));
}

// Replace dP of a step by dS.
CUFLASH_DEVICE void make_ds(Scores& s, Scores& dp, const attention::Params& params, const BlockState& state,
                            const attention::KvBlock& block, const MembersOfTile& members,
                            const attention::RowStatistics<Scores>& row,
                            const score::Function& score_function, attention::DropoutArgument<Config> dropout,
                            attention::ChosenArgument<Config> chosen) {
  using namespace attention;
  const Shape& shape = params.shape;
  if constexpr (kHasScore && Config::kHasDropout)
    drop_gradients(dp, kept_weights_of_queries(dp, dropout, shape, state.work, block),
                   static_cast<float>(dropout.factor));
  if constexpr (kHasScore || Config::kHasDropout) {
    const bool is_masked = !is_unmasked<kBlockKv>(block) || !members.has_all();
    if (is_masked) mask_step<Config::kIsListed>(s, params, state.work, block, masked_score(), members);
    const uint32_t head = head_number(shape, state.work.batch_head, state.work.batch_head.head);
    if constexpr (!kHasScore)
      dropout_score_gradients(s, dp, dropout, head, state.work.first, block.start, is_masked,
                              state.softmax_scale_log2, row);
    else
      scores_to_p_and_ds_of_tile(s, dp, score_function, params, chosen, state.work, block, is_masked, row);
  } else if (is_unmasked<kBlockKv>(block) && members.has_all()) {
    score_gradients<false>(s, dp, state.softmax_scale_log2, row);
  } else {
    mask_step<Config::kIsListed>(s, params, state.work, block, masked_score(), members);
    score_gradients<true>(s, dp, state.softmax_scale_log2, row);
  }
}

constexpr int kSharedBytes = kStateOffset + static_cast<int>(sizeof(BlockState));

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_backward_rows(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = tile_of_block<Listed>(params, chosen, kBlockQ);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  // computed first, since loads from a list have a high latency
  const VisitRange visit_range = visit_range_of_tile(params, chosen, work);
  tile::load_async<kThreads>(q_smem, rows_of_tile<Element>(chosen, params.q, work, shape.head_dim));
  tile::load_async<kThreads>(do_smem, rows_of_tile<Element>(chosen, params.do_, work, shape.value_dim));
  auto& state = *reinterpret_cast<BlockState*>(ptx::dynamic_shared<unsigned char>() + kStateOffset);
  if (threadIdx.x == 0) {
    const int kv_head = divmod(batch_head.head, shape.group_size).quotient;
    state.work = work;
    state.softmax_scale_log2 = shape.softmax_scale * kLog2E;
    state.visit_range = visit_range;
    state.k = matrix<Element>(params.k, batch_head, kv_head, 0, 0).data;
    state.v = matrix<Element>(params.v, batch_head, kv_head, 0, 0).data;
    state.rows_fill_tiles =
        has_full_rows<KTile>(state.k, params.k, shape.head_dim) &&
            has_full_rows<VTile>(state.v, params.v, shape.value_dim);
  }

  const auto row = row_statistics<Scores>(rows_of_tile<float>(chosen, params.lse, work, 1),
                                          rows_of_tile<float>(chosen, params.delta, work, 1));
  Dq dq;
  dq.fill(0);
  __syncthreads();  // the state is stored
  BlockIterator<kBlockKv, Walk, Listed> blocks(params, state.visit_range);
  MembersOfTile members(chosen, work);
  KvBlock block, next_block;
  bool has_block = blocks.next(block);
  if (has_block) load_block(params, state, block, 0);
  ptx::cp_async_commit();
  // The block after the next one is looked up now, so that loads from a list arrive while the current block is
  // multiplied.
  bool has_next_block = blocks.next(next_block);
  for (int stage = 0; has_block; stage = kNumStages - 1 - stage) {
    const KTile k_smem{kKOffset + stage * KTile::kBytes};
    const VTile v_smem{kVOffset + stage * VTile::kBytes};
    ptx::cp_async_wait<0>();
    __syncthreads();  // K and V have arrived, and Q and dO before the first step; the last K and V have been read
    if (kNumStages == 2 && has_next_block) load_block(params, state, next_block, 1 - stage);
    ptx::cp_async_commit();
    members.read(block);
    if (members.has_any()) {
      Scores s, dp;
      tile::gemm_nt(s, q_smem, k_smem);
      tile::gemm_nt(dp, do_smem, v_smem);
      make_ds(s, dp, params, state, block, members, row, score_function, dropout, chosen);
      tile::gemm_add_nn(dq, dp, k_smem);
    }
    if (kNumStages == 1) {
      __syncthreads();  // all warps have read K and V
      if (has_next_block) load_block(params, state, next_block, 0);
      ptx::cp_async_commit();
    }
    block = next_block;
    has_block = has_next_block;
    has_next_block = blocks.next(next_block);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q has arrived, even without a step, and all threads have read it
  dq.scale(shape.softmax_scale);
  write_gradient_of_queries(chosen, params.dq, state.work, shape.head_dim, q_smem, dq);
}
