// The tangents of dK and dV of one tile of keys on the tensor cores of Ampere, summed over the query heads that share
// it. Scores are transposed: rows are keys, which a warp keeps in registers. Results are bitwise reproducible.
// score_gradient_mma.cuh is included first, since the `probability` with the approximate exponential must be declared
// before it is used.
#include <attention/score_gradient_mma.cuh>
#include <attention/empty_rows.cuh>
#include <attention/gradient_tangents.cuh>
#include <attention/mask_keys_mma.cuh>
#include <ptx/cp_async.cuh>
#include <sm80/tangent_tiles.cuh>

namespace cuflash::sm80 {

using Scores = tile::WarpTile<kBlockKv / (16 * kNumWarps), kBlockQ / 8, kNumWarps>;
using Dk = tile::WarpTile<kBlockKv / (16 * kNumWarps), kHeadDim / 8, kNumWarps>;
using Dv = tile::WarpTile<kBlockKv / (16 * kNumWarps), kValueDim / 8, kNumWarps>;
using Statistics = attention::QueryTangents<float>;

constexpr KTile k_smem{0};
constexpr VTile v_smem{KTile::kBytes};
constexpr KTile k_dot_smem{v_smem.start + VTile::kBytes};
constexpr VTile v_dot_smem{k_dot_smem.start + KTile::kBytes * Config::kHasKDot};
constexpr QTile q_smem{v_dot_smem.start + VTile::kBytes * Config::kHasVDot};
constexpr OTile do_smem{q_smem.start + QTile::kBytes};
constexpr QTile q_dot_smem{do_smem.start + OTile::kBytes};
constexpr OTile do_dot_smem{q_dot_smem.start + QTile::kBytes * Config::kHasQDot};
constexpr int kStatisticsOffset = do_dot_smem.start + OTile::kBytes * Config::kHasDoDot;
constexpr int kSharedBytes = kStatisticsOffset + kBlockQ * static_cast<int>(sizeof(Statistics));

// Replace products by P, P_dot, dS and dS_dot, as `gradient_tangents` does.
CUFLASH_DEVICE void differentiate(Scores& s, Scores& s_dot, Scores& dp, Scores& dp_dot, const Statistics* statistics,
                                  const score::Function& score_function, attention::DropoutArgument<Config> dropout,
                                  const attention::Params& params, const attention::WorkTile& work,
                                  const attention::KvBlock& block) {
  using namespace attention;
  KeptFragments<Scores, true> kept;
  if constexpr (Config::kHasDropout) {
    kept = kept_fragments<true>(s, Draws(dropout), head_number(params.shape, work.batch_head, work.batch_head.head),
                                work.first, block.start);
    drop_gradients(dp, kept, dropout.single_factor);
    drop_gradients(dp_dot, kept, dropout.single_factor);
  }
  const bool is_masked = !is_unmasked<kBlockQ>(block) || work.last - work.first != kBlockKv;
  if (is_masked) mask_scores_of_keys(s, params, work, block);
  gradient_tangents<attention::Rows::kKeys>(
      s, s_dot, dp, dp_dot, score_function, params, work, block,
      [&](int i, int j) { return !is_masked || !is_masked_score(s.at(i, j)); },
      [&](int j) { return statistics[Scores::first_column() + Scores::column(j)]; });
  if constexpr (Config::kHasDropout) {
    drop_weights(s, kept);
    drop_weights(s_dot, kept);
  }
}

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_backward_jvp_columns(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  WorkTile work = key_tile<Listed>(params, kBlockKv);
  if (work.is_empty()) return;
  const int first_head = work.batch_head.head, kv_head = divmod(first_head, shape.group_size).quotient;
  const auto of_keys = [&](const Matrices& x, int columns) {
    return matrix<Element>(x, work.batch_head, kv_head, shape.seqlen_kv, columns).rows(work.first, work.last);
  };
  tile::load_async<kThreads>(k_smem, of_keys(params.k, shape.head_dim));
  tile::load_async<kThreads>(v_smem, of_keys(params.v, shape.value_dim));
  if constexpr (Config::kHasKDot) tile::load_async<kThreads>(k_dot_smem, of_keys(tangents.k_dot, shape.head_dim));
  if constexpr (Config::kHasVDot) tile::load_async<kThreads>(v_dot_smem, of_keys(tangents.v_dot, shape.value_dim));
  ptx::cp_async_commit();
  auto* const statistics = reinterpret_cast<Statistics*>(ptx::dynamic_shared<unsigned char>() + kStatisticsOffset);

  Dk dk;
  Dv dv;
  dk.fill(0);
  dv.fill(0);
  for (int head = first_head; head < first_head + shape.group_size; ++head) {
    work.batch_head.head = head;
    const auto lse = matrix<float>(params.lse, work.batch_head, head, shape.seqlen_q, 1);
    const auto load = [&](auto to, const Matrices& x, int columns, const KvBlock& block) {
      Element* const data = matrix<Element>(x, work.batch_head, head, 0, 0).data;
      load_rows(to, data, x, columns, block, has_full_rows<decltype(to)>(data, x, columns));
    };
    const VisitRange visit_range = visit_range_of_keys(params, work);
    BlockIterator<kBlockQ, OverQBlocks, Listed> blocks(params, visit_range);
    for (KvBlock block; blocks.next(block);) {
      __syncthreads();  // all threads have read Q, dO and the statistics of the last step
      load(q_smem, params.q, shape.head_dim, block);
      load(do_smem, params.do_, shape.value_dim, block);
      if constexpr (Config::kHasQDot) load(q_dot_smem, tangents.q_dot, shape.head_dim, block);
      if constexpr (Config::kHasDoDot) load(do_dot_smem, tangents.do_dot, shape.value_dim, block);
      ptx::cp_async_commit();
      for (int row = threadIdx.x; row < kBlockQ; row += kThreads)
        statistics[row] = query_tangents<float>(params, tangents, work.batch_head, block.start + row,
                                                block.start + row < block.stop);
      ptx::cp_async_wait<0>();
      __syncthreads();  // Q, dO and the statistics have arrived, and K and V before the first step
      clear_empty_rows(do_smem, lse.rows(block.start, block.stop));
      if constexpr (Config::kHasDoDot) clear_empty_rows(do_dot_smem, lse.rows(block.start, block.stop));
      Scores s, s_dot, dp, dp_dot;
      if constexpr (!Config::kHasQDot && !Config::kHasKDot) s_dot.fill(0);
      if constexpr (!Config::kHasDoDot && !Config::kHasVDot) dp_dot.fill(0);
      multiply_with_tangents<Config::kHasKDot, Config::kHasQDot>(s, s_dot, k_smem, k_dot_smem, q_smem, q_dot_smem);
      multiply_with_tangents<Config::kHasVDot, Config::kHasDoDot>(dp, dp_dot, v_smem, v_dot_smem, do_smem,
                                                                  do_dot_smem);
      differentiate(s, s_dot, dp, dp_dot, statistics, score_function, dropout, params, work, block);
      tile::gemm_add_nn(dv, s_dot, do_smem);
      if constexpr (Config::kHasDoDot) tile::gemm_add_nn(dv, s, do_dot_smem);
      tile::gemm_add_nn(dk, dp_dot, q_smem);
      if constexpr (Config::kHasQDot) tile::gemm_add_nn(dk, dp, q_dot_smem);
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // K and V have arrived, even without a step, and all threads have read them
  dk.scale(shape.softmax_scale);
  if constexpr (Config::kHasDropout) dv.scale(dropout.single_factor);
  write_rows(params.dk, work, kv_head, shape.head_dim, k_smem, dk);
  write_rows(params.dv, work, kv_head, shape.value_dim, v_smem, dv);
}
