// The tangent of dQ of one tile of queries on the tensor cores of Ampere. Each warp keeps its rows of scores in
// registers. Results are bitwise reproducible.
// score_gradient_mma.cuh is included first, since the `probability` with the approximate exponential must be declared
// before it is used.
#include <attention/score_gradient_mma.cuh>
#include <attention/gradient_tangents.cuh>
#include <ptx/cp_async.cuh>
#include <sm80/tangent_tiles.cuh>

namespace cuflash::sm80 {

using Scores = tile::WarpTile<kBlockQ / (16 * kNumWarps), kBlockKv / 8, kNumWarps>;
using Dq = tile::WarpTile<kBlockQ / (16 * kNumWarps), kHeadDim / 8, kNumWarps>;
using Statistics = attention::QueryTangents<float>;

constexpr QTile q_smem{0};
constexpr OTile do_smem{QTile::kBytes};
constexpr QTile q_dot_smem{do_smem.start + OTile::kBytes};
constexpr OTile do_dot_smem{q_dot_smem.start + QTile::kBytes * Config::kHasQDot};
constexpr KTile k_smem{do_dot_smem.start + OTile::kBytes * Config::kHasDoDot};
constexpr VTile v_smem{k_smem.start + KTile::kBytes};
constexpr KTile k_dot_smem{v_smem.start + VTile::kBytes};
constexpr VTile v_dot_smem{k_dot_smem.start + KTile::kBytes * Config::kHasKDot};
constexpr int kStatisticsOffset = v_dot_smem.start + VTile::kBytes * Config::kHasVDot;
constexpr int kSharedBytes = kStatisticsOffset + kBlockQ * static_cast<int>(sizeof(Statistics));

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_backward_jvp_rows(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile<Listed>(params, kBlockQ);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const int kv_head = divmod(batch_head.head, shape.group_size).quotient;
  const VisitRange visit_range = visit_range_of_queries(params, work);
  const auto of_queries = [&](const Matrices& x, int columns) {
    return matrix<Element>(x, batch_head, batch_head.head, shape.seqlen_q, columns).rows(work.first, work.last);
  };
  tile::load_async<kThreads>(q_smem, of_queries(params.q, shape.head_dim));
  tile::load_async<kThreads>(do_smem, of_queries(params.do_, shape.value_dim));
  if constexpr (Config::kHasQDot) tile::load_async<kThreads>(q_dot_smem, of_queries(tangents.q_dot, shape.head_dim));
  if constexpr (Config::kHasDoDot)
    tile::load_async<kThreads>(do_dot_smem, of_queries(tangents.do_dot, shape.value_dim));
  ptx::cp_async_commit();
  auto* const statistics = reinterpret_cast<Statistics*>(ptx::dynamic_shared<unsigned char>() + kStatisticsOffset);
  for (int row = threadIdx.x; row < kBlockQ; row += kThreads)
    statistics[row] =
        query_tangents<float>(params, tangents, batch_head, work.first + row, work.first + row < work.last);
  const auto load = [&](auto to, const Matrices& x, int columns, const KvBlock& block) {
    Element* const data = matrix<Element>(x, batch_head, kv_head, 0, 0).data;
    load_rows(to, data, x, columns, block, has_full_rows<decltype(to)>(data, x, columns));
  };
  Dq dq;
  dq.fill(0);
  BlockIterator<kBlockKv, OverKvBlocks, Listed> blocks(params, visit_range);
  for (KvBlock block; blocks.next(block);) {
    __syncthreads();  // all threads have read K and V of the last step
    load(k_smem, params.k, shape.head_dim, block);
    load(v_smem, params.v, shape.value_dim, block);
    if constexpr (Config::kHasKDot) load(k_dot_smem, tangents.k_dot, shape.head_dim, block);
    if constexpr (Config::kHasVDot) load(v_dot_smem, tangents.v_dot, shape.value_dim, block);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();  // K and V have arrived, and Q, dO and the statistics before the first step
    Scores s, s_dot, dp, dp_dot;
    if constexpr (!Config::kHasQDot && !Config::kHasKDot) s_dot.fill(0);
    if constexpr (!Config::kHasDoDot && !Config::kHasVDot) dp_dot.fill(0);
    multiply_with_tangents<Config::kHasQDot, Config::kHasKDot>(s, s_dot, q_smem, q_dot_smem, k_smem, k_dot_smem);
    multiply_with_tangents<Config::kHasDoDot, Config::kHasVDot>(dp, dp_dot, do_smem, do_dot_smem, v_smem, v_dot_smem);
    if constexpr (Config::kHasDropout) {
      const auto kept = kept_fragments<false>(s, Draws(dropout), head_number(shape, batch_head, batch_head.head),
                                              work.first, block.start);
      drop_gradients(dp, kept, dropout.single_factor);
      drop_gradients(dp_dot, kept, dropout.single_factor);
    }
    const bool is_masked = !is_unmasked<kBlockKv>(block);
    if (is_masked) mask_scores<Config::kIsListed>(s, params, work, block, masked_score());
    gradient_tangents<attention::Rows::kQueries>(
        s, s_dot, dp, dp_dot, score_function, params, work, block,
        [&](int i, int j) { return !is_masked || !is_masked_score(s.at(i, j)); },
        [&](int i) { return statistics[Scores::first_row() + Scores::row(i)]; });
    tile::gemm_add_nn(dq, dp_dot, k_smem);
    if constexpr (Config::kHasKDot) tile::gemm_add_nn(dq, dp, k_dot_smem);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q has arrived, even without a step, and all threads have read it
  dq.scale(shape.softmax_scale);
  write_rows(params.dq, work, batch_head.head, shape.head_dim, q_smem, dq);
}
