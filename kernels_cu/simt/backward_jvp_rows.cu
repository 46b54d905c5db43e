// The tangent of dQ of one tile of queries. V, its tangent, K and its tangent take turns in one tile of shared memory.
// Results are bitwise reproducible.
#include <attention/config_simt.cuh>
#include <attention/gradient_tangents.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::simt {

constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
using KvTile = tile::SharedTile<Accumulator, kBlockKv, kWidest>;
using Scores = tile::RegisterTile<Accumulator, kBlockQ, kBlockKv>;
constexpr int kSharedBytes = kBytesOf<QTile, DoTile, KvTile, PTile> + Config::kHasQDot * kBytesOf<QTile> +
    Config::kHasDoDot * kBytesOf<DoTile>;

// Replace the products by dS and dS_dot, as `gradient_tangents` does.
CUFLASH_DEVICE void differentiate(Scores& s, Scores& s_dot, Scores& dp, Scores& dp_dot,
                                  const attention::QueryTangents<Accumulator> (&row)[Scores::kRows],
                                  const score::Function& score_function, attention::DropoutArgument<Config> dropout,
                                  const attention::Params& params, const attention::WorkTile& work,
                                  const attention::KvBlock& block) {
  using namespace attention;
  if constexpr (Config::kHasDropout) {
    const auto kept = kept_weights_of_queries(dp, dropout, params.shape, work, block);
    drop_gradients(dp, kept, static_cast<Accumulator>(dropout.factor));
    drop_gradients(dp_dot, kept, static_cast<Accumulator>(dropout.factor));
  }
  const auto mask = score_mask_of_queries<Scores>(params, work, block);
  gradient_tangents<attention::Rows::kQueries>(
      s, s_dot, dp, dp_dot, score_function, params, work, block, [&](int i, int j) { return mask.allows(i, j); },
      [&](int i) { return row[i]; });
}

}  // namespace cuflash::simt

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_backward_jvp_rows(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::simt;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const int head = batch_head.head, kv_head = head / shape.group_size;
  const auto of_queries = [&](const Matrices& x, int columns) {
    return matrix<Element>(x, batch_head, head, shape.seqlen_q, columns).rows(work.first, work.last);
  };

  Accumulator* const smem = ptx::dynamic_shared<Accumulator>();
  const QTile q_smem{smem};
  const DoTile do_smem{q_smem.data + QTile::kElements};
  const KTile k_smem{do_smem.data + DoTile::kElements};  // K or its tangent
  const VTile v_smem{k_smem.data};  // V or its tangent
  const PTile ds_smem{k_smem.data + KvTile::kElements};
  const QTile q_dot_smem{ds_smem.data + PTile::kElements};
  const DoTile do_dot_smem{q_dot_smem.data + QTile::kElements * Config::kHasQDot};
  tile::load(q_smem, of_queries(params.q, shape.head_dim));
  tile::load(do_smem, of_queries(params.do_, shape.value_dim));
  if constexpr (Config::kHasQDot) tile::load(q_dot_smem, of_queries(tangents.q_dot, shape.head_dim));
  if constexpr (Config::kHasDoDot) tile::load(do_dot_smem, of_queries(tangents.do_dot, shape.value_dim));

  tile::RegisterTile<Accumulator, kBlockQ, kHeadDim, kRun> dq;
  QueryTangents<Accumulator> row[dq.kRows];
#pragma unroll
  for (int i = 0; i < dq.kRows; ++i)
    row[i] = query_tangents<Accumulator>(params, tangents, batch_head, work.first + dq.row(i),
                                         work.first + dq.row(i) < work.last);
  dq.fill(0);
  const VisitRange visit_range = visit_range_of_queries(params, work);
  BlockIterator<kBlockKv, OverKvBlocks> blocks(params, visit_range);
  for (KvBlock block; blocks.next(block);) {
    const auto load_step = [&](auto to, const Matrices& x, int columns) {
      __syncthreads();  // all threads have read the old contents of the tile
      tile::load(to, matrix<Element>(x, batch_head, kv_head, shape.seqlen_kv, columns).rows(block.start, block.stop));
      __syncthreads();  // the rows have arrived
    };
    Scores s, s_dot, dp, dp_dot;
    s.fill(0);
    s_dot.fill(0);
    dp.fill(0);
    dp_dot.fill(0);
    load_step(v_smem, params.v, shape.value_dim);
    tile::gemm_add_nt(dp, do_smem, v_smem);
    if constexpr (Config::kHasDoDot) tile::gemm_add_nt(dp_dot, do_dot_smem, v_smem);
    if constexpr (Config::kHasVDot) {
      load_step(v_smem, tangents.v_dot, shape.value_dim);
      tile::gemm_add_nt(dp_dot, do_smem, v_smem);
    }
    if constexpr (Config::kHasKDot) {
      load_step(k_smem, tangents.k_dot, shape.head_dim);
      tile::gemm_add_nt(s_dot, q_smem, k_smem);
    }
    load_step(k_smem, params.k, shape.head_dim);
    tile::gemm_add_nt(s, q_smem, k_smem);
    if constexpr (Config::kHasQDot) tile::gemm_add_nt(s_dot, q_dot_smem, k_smem);
    differentiate(s, s_dot, dp, dp_dot, row, score_function, dropout, params, work, block);
    tile::store(ds_smem, dp_dot);
    __syncthreads();  // dS_dot is stored
    tile::gemm_add_nn(dq, ds_smem, k_smem);
    if constexpr (Config::kHasKDot) {
      load_step(k_smem, tangents.k_dot, shape.head_dim);
      tile::store(ds_smem, dp);
      __syncthreads();  // dS is stored
      tile::gemm_add_nn(dq, ds_smem, k_smem);
    }
  }
  dq.scale(shape.softmax_scale);
  store_gradient<Element>(params.dq, work, head, shape.seqlen_q, shape.head_dim, dq);
}
