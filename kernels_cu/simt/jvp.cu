// The tangents of o and lse, from the o and lse that the forward pass wrote. A thread block computes one tile of
// queries and walks over their keys as the forward pass does; K, its tangent, V and its tangent take turns in one tile
// of shared memory. Results are bitwise reproducible.
#include <attention/config_simt.cuh>
#include <attention/dropout.cuh>
#include <attention/mask_simt.cuh>
#include <attention/tangent_weights.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::simt {

constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
using KvTile = tile::SharedTile<Accumulator, kBlockKv, kWidest>;
constexpr int kSharedBytes = kBytesOf<QTile, KvTile, PTile> + (Config::kHasQDot ? kBytesOf<QTile> : 0);
using Scores = tile::RegisterTile<Accumulator, kBlockQ, kBlockKv>;
using Output = tile::RegisterTile<Accumulator, kBlockQ, kValueDim, kRun>;

// Replace scores by weights and their tangents, as `weights_and_tangents` does.
CUFLASH_DEVICE void update(Scores& s, Scores& s_dot, attention::RowTangents<Accumulator, Scores::kRows>& rows,
                           const score::Function& score_function, const attention::Params& params,
                           const attention::WorkTile& work, const attention::KvBlock& block) {
  using namespace attention;
  const Accumulator scale = params.shape.softmax_scale;
  if constexpr (kHasScore && kMovesScores) score_tangents_of_queries(s, s_dot, score_function, scale, work, block);
  else if constexpr (kHasScore) score_of_queries(s, score_function, scale, work, block, 1.0);
  const bool is_full = block.kind == BlockKind::kFull && block.stop - block.start == kBlockKv;
  const auto mask = is_full ? ScoreMask<Scores::kColumns>{~0ull} : score_mask_of_queries<Scores>(params, work, block);
  weights_and_tangents<true>(
      s, s_dot, rows, Accumulator((kHasScore ? 1.0 : params.shape.softmax_scale) * kLog2E),
      kHasScore ? Accumulator(1) : scale, [&](int i, int j) { return mask.allows(i, j); },
      [](Accumulator x) { return tile::row_sum(x); });
}

// Write o_dot and lse_dot.
CUFLASH_DEVICE void write_results(const attention::Params& params, const attention::Tangents& tangents,
                                  const attention::WorkTile& work,
                                  const attention::RowTangents<Accumulator, Scores::kRows>& rows, Output& o_dot,
                                  attention::SinkArgument<Config> sink, attention::DropoutArgument<Config> dropout) {
  using namespace attention;
  const BatchHead& batch_head = work.batch_head;
  const auto of_tile = [&](auto zero, const Matrices& x, int columns) {
    return matrix<decltype(zero)>(x, batch_head, batch_head.head, params.shape.seqlen_q, columns)
        .rows(work.first, work.last);
  };
  const auto o = of_tile(Element{}, params.o, params.shape.value_dim);
  const auto lse = of_tile(Accumulator(), params.lse, 1), lse_dot = of_tile(Accumulator(), tangents.lse_dot, 1);
#pragma unroll
  for (int i = 0; i < o_dot.kRows; ++i) {
    const int row = o_dot.row(i);
    const bool in_bounds = row < lse.num_rows;
    const auto result = row_result(tile::row_sum(rows.sum[i]), rows.center[i], rows.has_key >> i & 1,
                                   in_bounds ? lse.at(row, 0) : Accumulator(0), sink, tangents, batch_head,
                                   batch_head.head);
    if constexpr (Config::kHasDropout) o_dot.scale_row(i, dropout.factor);
#pragma unroll
    for (int j = 0; j < o_dot.kColumns; ++j) {
      const int column = o_dot.column(j);
      const bool is_read = (kMovesScores || Config::kHasSinkDot) && in_bounds && column < o.num_columns;
      const Accumulator of_o = is_read ? tile::to_accumulator(o.at(row, column)) : Accumulator(0);
      o_dot.at[i][j] = result.o_dot(o_dot.at[i][j], of_o);
    }
    if (tile::is_row_leader() && in_bounds) lse_dot.at(row, 0) = result.lse_dot;
  }
  tile::store_vectorized(of_tile(Element{}, tangents.o_dot, params.shape.value_dim), o_dot);
}

}  // namespace cuflash::simt

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_jvp(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::simt;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const WorkTile work = query_tile(params, kBlockQ);
  if (work.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const int head = batch_head.head, kv_head = head / shape.group_size;
  const auto of_keys = [&](const Matrices& x, int columns) {
    return matrix<Element>(x, batch_head, kv_head, shape.seqlen_kv, columns);
  };
  const auto of_queries = [&](const Matrices& x, int columns) {
    return matrix<Element>(x, batch_head, head, shape.seqlen_q, columns).rows(work.first, work.last);
  };

  Accumulator* const smem = ptx::dynamic_shared<Accumulator>();
  const QTile q_smem{smem};
  Accumulator* const kv = smem + QTile::kElements;
  const KTile k_smem{kv};  // K, then its tangent
  const VTile v_smem{kv};  // V, then its tangent
  const PTile p_smem{kv + KvTile::kElements};  // w, then P
  const QTile q_dot_smem{p_smem.data + PTile::kElements};
  tile::load(q_smem, of_queries(params.q, shape.head_dim));
  if constexpr (Config::kHasQDot) tile::load(q_dot_smem, of_queries(tangents.q_dot, shape.head_dim));

  const auto lse = matrix<Accumulator>(params.lse, batch_head, head, shape.seqlen_q, 1).rows(work.first, work.last);
  RowTangents<Accumulator, Scores::kRows> rows(lse, [](int i) { return Scores::row(i); });
  Output o_dot;
  o_dot.fill(0);
  const VisitRange visit_range = visit_range_of_queries(params, work);
  BlockIterator<kBlockKv, OverKvBlocks> blocks(params, visit_range);
  for (KvBlock block; blocks.next(block);) {
    __syncthreads();  // all threads have read V and P of the last step
    tile::load(k_smem, of_keys(params.k, shape.head_dim).rows(block.start, block.stop));
    __syncthreads();  // K has arrived, and Q before the first step
    Scores s, s_dot;
    s.fill(0);
    s_dot.fill(0);
    tile::gemm_add_nt(s, q_smem, k_smem);
    if constexpr (Config::kHasQDot) tile::gemm_add_nt(s_dot, q_dot_smem, k_smem);
    if constexpr (Config::kHasKDot) {
      __syncthreads();  // all threads have read K
      tile::load(k_smem, of_keys(tangents.k_dot, shape.head_dim).rows(block.start, block.stop));
      __syncthreads();  // the tangent of K has arrived
      tile::gemm_add_nt(s_dot, q_smem, k_smem);
    }
    update(s, s_dot, rows, score_function, params, work, block);
    if constexpr (Config::kHasDropout) {
      const auto kept = kept_weights_of_queries(s, dropout, shape, work, block);
      drop_weights(s, kept);
      if constexpr (kMovesScores) drop_weights(s_dot, kept);
    }
    if constexpr (kMovesScores) {
      __syncthreads();  // all threads have read K, or its tangent
      tile::load(v_smem, of_keys(params.v, shape.value_dim).rows(block.start, block.stop));
      tile::store(p_smem, s_dot);
      __syncthreads();  // V has arrived, and w is stored
      tile::gemm_add_nn(o_dot, p_smem, v_smem);
    }
    if constexpr (Config::kHasVDot) {
      __syncthreads();  // all threads have read V and w
      tile::load(v_smem, of_keys(tangents.v_dot, shape.value_dim).rows(block.start, block.stop));
      tile::store(p_smem, s);
      __syncthreads();  // the tangent of V has arrived, and P is stored
      tile::gemm_add_nn(o_dot, p_smem, v_smem);
    }
  }

  write_results(params, tangents, work, rows, o_dot, sink, dropout);
}
