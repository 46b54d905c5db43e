// Backward pass of standard attention: P = exp2(S - lse), which overwrites S, and dS = P (dP - delta) in a second
// matrix, where dP = do v^T and delta = rowsum(do o) - dlse. A thread block computes one tile of both, and recomputes
// delta of its rows.
#include <attention/dropout.cuh>
#include <attention/mask_simt.cuh>
#include <attention/score_gradient.cuh>
#include <attention/score_slopes.cuh>
#include <naive/products.cuh>

namespace cuflash::naive {

constexpr int kSharedBytes = kBytesOf<DoTile, VTile>;

}  // namespace cuflash::naive

// Four blocks per multiprocessor: without this bound, ptxas 13.0 tries to fit more blocks, and spills registers in some
// specifications.
extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 4)
naive_gradient_scores(const __grid_constant__ cuflash::attention::Params params,
                      const __grid_constant__ cuflash::naive::ScoreMatrices matrices CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::naive;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  const Tiling key_tiles = key_tiling(params, kBlockKv);
  const WorkTile work = query_tile(params, kBlockQ, key_tiles.num_tiles());
  const Range keys = key_tiles.tile(split_index(key_tiles.num_tiles()));
  if (work.is_empty() || keys.is_empty()) return;
  const BatchHead& batch_head = work.batch_head;
  const auto rows = [&](auto all) { return all.rows(work.first, work.last); };
  const auto d_o = rows(matrix<Element>(params.do_, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim));
  const auto o = rows(matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim));
  const auto lse = rows(matrix<Accumulator>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1));
  const auto dlse = rows(matrix<Accumulator>(params.dlse, batch_head, batch_head.head, shape.seqlen_q, 1));
  const auto v = matrix<Element>(params.v, batch_head, batch_head.head / shape.group_size, shape.seqlen_kv,
                                 shape.value_dim)
                     .rows(keys.first, keys.last);

  tile::RegisterTile<Accumulator, kBlockQ, kBlockKv> s, dp;
  dp.fill(0);
  add_product_of_rows<kValueDim>(dp, d_o, v);

  const auto p = rows(matrix<Accumulator>(matrices.scores, batch_head, batch_head.head, shape.seqlen_q,
                                          shape.seqlen_kv))
                     .columns(keys.first, keys.last);
  const auto ds = rows(matrix<Accumulator>(matrices.score_gradients, batch_head, batch_head.head, shape.seqlen_q,
                                           shape.seqlen_kv)).columns(keys.first, keys.last);
  KeptWeights<decltype(s)> kept;
  if constexpr (Config::kHasDropout) {
    kept = kept_weights_of_queries(s, dropout, shape, work, KvBlock{keys.first, keys.last, BlockKind::kInterval, -1});
    drop_gradients(dp, kept, static_cast<Accumulator>(dropout.factor));
  }
  // An attended score may be -inf, like masked scores, so the mask is evaluated again.
  using Scores = decltype(s);
  KvBlock block;
  ScoreMask<Scores::kColumns> row_mask{0};
  Accumulator lse_of_row[Scores::kRows], delta_of_row[Scores::kRows];  // for kernels with a score function
  if (find_block(params, batch_head, rows_of(work), keys, block)) row_mask = score_mask_of_queries<Scores>(params, work,
                                                                                                           block);
#pragma unroll
  for (int i = 0; i < s.kRows; ++i) {
    const int row = s.row(i);
    const bool in_bounds = row < p.num_rows;
    Accumulator delta = 0;
    for (int column = tile::column_lane(); in_bounds && column < shape.value_dim; column += tile::kColumnLanes)
      delta += tile::to_accumulator(d_o.at(row, column)) * tile::to_accumulator(o.at(row, column));
    delta = tile::row_sum(delta);
    const Accumulator lse_2 = in_bounds ? lse_in_base_2(lse.at(row, 0)) : Accumulator(0);
    const bool is_empty = lse_2 == -ptx::negative_infinity<Accumulator>();  // without a key, gradients are 0
    if (is_empty) delta = 0;
    else if (in_bounds && params.dlse.data != nullptr) delta -= dlse.at(row, 0);
    if constexpr (kHasScore) {
      lse_of_row[i] = in_bounds ? lse_2 : -ptx::negative_infinity<Accumulator>();
      delta_of_row[i] = delta;
#pragma unroll
      for (int j = 0; j < s.kColumns; ++j) s.at[i][j] = row_mask.allows(i, j) ? p.at(row, s.column(j)) : Accumulator(0);
      continue;
    }
#pragma unroll
    for (int j = 0; j < s.kColumns; ++j) {
      const bool is_seen = row_mask.allows(i, j);
      s.at[i][j] = is_seen ? probability(p.at(row, s.column(j)), Accumulator(1), lse_2) : Accumulator(0);
      dp.at[i][j] = is_seen ? score_gradient(s.at[i][j], dp.at[i][j], delta) : Accumulator(0);
    }
  }
  if constexpr (kHasScore) {
    scores_to_p_and_ds<Rows::kQueries>([&](int i, int j) -> Accumulator& { return s.at[i][j]; }, dp, score_function,
                                       shape, batch_head, {work.first, work.last}, {keys.first, keys.last},
                                       [&](int i, int j) { return row_mask.allows(i, j); },
                                       [&](int i) { return lse_of_row[i]; }, [&](int i) { return delta_of_row[i]; },
                                       score::Function::kAddsGradients);
  }
  if constexpr (Config::kHasDropout) {
    drop_weights(s, kept);
    s.scale(dropout.factor);
  }
  tile::store(p, s);
  tile::store(ds, dp);
}
