// The tangents of dK and dV of one tile of keys, summed over the query heads that share it. Scores are transposed: rows
// are keys. dO, Q and their tangents take turns in one tile of shared memory. Results are bitwise reproducible.
#include <attention/config_simt.cuh>
#include <attention/gradient_tangents.cuh>
#include <ptx/shared.cuh>
#include <tile/gemm_simt.cuh>

namespace cuflash::simt {

constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
using QueryTile = tile::SharedTile<Accumulator, kBlockQ, kWidest>;
using PtTile = tile::SharedTile<Accumulator, kBlockKv, kBlockQ>;
using Scores = tile::RegisterTile<Accumulator, kBlockKv, kBlockQ>;
using Dk = tile::RegisterTile<Accumulator, kBlockKv, kHeadDim, kRun>;
using Dv = tile::RegisterTile<Accumulator, kBlockKv, kValueDim, kRun>;
using Statistics = attention::QueryTangents<Accumulator>;
constexpr int kSharedBytes = kBytesOf<KTile, VTile, QueryTile, PtTile> + Config::kHasKDot * kBytesOf<KTile> +
    Config::kHasVDot * kBytesOf<VTile> + kBlockQ * static_cast<int>(sizeof(Statistics));

// The tiles in shared memory.
struct Tiles {
  KTile k;
  VTile v;
  QTile q;  // Q or its tangent
  DoTile d_o;  // dO or its tangent, in the same memory as `q`
  PtTile p;
  KTile k_dot;
  VTile v_dot;
  Statistics* statistics;

  explicit CUFLASH_DEVICE Tiles(Accumulator* smem)
      : k{smem}, v{k.data + KTile::kElements}, q{v.data + VTile::kElements}, d_o{q.data},
        p{q.data + QueryTile::kElements}, k_dot{p.data + PtTile::kElements},
        v_dot{k_dot.data + KTile::kElements * Config::kHasKDot},
        statistics(reinterpret_cast<Statistics*>(v_dot.data + VTile::kElements * Config::kHasVDot)) {}
};

// Load keys, values and their tangents.
CUFLASH_DEVICE void load_keys(const Tiles& tiles, const attention::Params& params, const attention::Tangents& tangents,
                              const attention::WorkTile& work, int kv_head) {
  const attention::Shape& shape = params.shape;
  const auto of_keys = [&](const attention::Matrices& x, int columns) {
    return attention::matrix<Element>(x, work.batch_head, kv_head, shape.seqlen_kv, columns)
        .rows(work.first, work.last);
  };
  tile::load(tiles.k, of_keys(params.k, shape.head_dim));
  tile::load(tiles.v, of_keys(params.v, shape.value_dim));
  if constexpr (Config::kHasKDot) tile::load(tiles.k_dot, of_keys(tangents.k_dot, shape.head_dim));
  if constexpr (Config::kHasVDot) tile::load(tiles.v_dot, of_keys(tangents.v_dot, shape.value_dim));
}

// Scale and write dK and dV.
CUFLASH_DEVICE void write_results(const attention::Params& params, const attention::WorkTile& work, int kv_head,
                                  Dk& dk, Dv& dv, attention::DropoutArgument<Config> dropout) {
  const attention::Shape& shape = params.shape;
  dk.scale(shape.softmax_scale);
  if constexpr (Config::kHasDropout) dv.scale(dropout.factor);
  attention::store_gradient<Element>(params.dk, work, kv_head, shape.seqlen_kv, shape.head_dim, dk);
  attention::store_gradient<Element>(params.dv, work, kv_head, shape.seqlen_kv, shape.value_dim, dv);
}

CUFLASH_DEVICE void clear_scores(Scores& s, Scores& s_dot, Scores& dp, Scores& dp_dot) {
  s.fill(0);
  s_dot.fill(0);
  dp.fill(0);
  dp_dot.fill(0);
}

// Load the statistics of a step's queries.
CUFLASH_DEVICE void load_statistics(Statistics* to, const attention::Params& params,
                                    const attention::Tangents& tangents, const attention::BatchHead& batch_head,
                                    const attention::KvBlock& block) {
  for (int row = threadIdx.x; row < kBlockQ; row += tile::kThreads)
    to[row] = attention::query_tangents<Accumulator>(params, tangents, batch_head, block.start + row,
                                                     block.start + row < block.stop);
}

// Replace the products by P, P_dot, dS and dS_dot, as `gradient_tangents` does.
CUFLASH_DEVICE void differentiate(Scores& s, Scores& s_dot, Scores& dp, Scores& dp_dot, const Statistics* statistics,
                                  const score::Function& score_function, attention::DropoutArgument<Config> dropout,
                                  const attention::Params& params, const attention::WorkTile& work,
                                  const attention::KvBlock& block) {
  using namespace attention;
  KeptWeights<Scores> kept;
  if constexpr (Config::kHasDropout) {
    kept = kept_weights_of_keys(s, dropout, params.shape, work, block);
    drop_gradients(dp, kept, static_cast<Accumulator>(dropout.factor));
    drop_gradients(dp_dot, kept, static_cast<Accumulator>(dropout.factor));
  }
  const auto mask = score_mask_of_keys<Scores>(params, work, block);
  gradient_tangents<attention::Rows::kKeys>(
      s, s_dot, dp, dp_dot, score_function, params, work, block, [&](int i, int j) { return mask.allows(j, i); },
      [&](int j) { return statistics[Scores::column(j)]; });
  if constexpr (Config::kHasDropout) {
    drop_weights(s, kept);
    drop_weights(s_dot, kept);
  }
}

}  // namespace cuflash::simt

extern "C" __global__ void __launch_bounds__(cuflash::tile::kThreads, 2)
simt_backward_jvp_columns(const __grid_constant__ cuflash::attention::Params params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::simt;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  WorkTile work = key_tile(params, kBlockKv);
  if (work.is_empty()) return;
  const int first_head = work.batch_head.head, kv_head = first_head / shape.group_size;

  const Tiles tiles(ptx::dynamic_shared<Accumulator>());
  load_keys(tiles, params, tangents, work, kv_head);
  Dk dk;
  Dv dv;
  dk.fill(0);
  dv.fill(0);
  for (int head = first_head; head < first_head + shape.group_size; ++head) {
    work.batch_head.head = head;
    const auto lse = matrix<Accumulator>(params.lse, work.batch_head, head, shape.seqlen_q, 1);
    const VisitRange visit_range = visit_range_of_keys(params, work);
    BlockIterator<kBlockQ, OverQBlocks> blocks(params, visit_range);
    for (KvBlock block; blocks.next(block);) {
      const auto rows_of = [&](const Matrices& x, int columns) {
        return matrix<Element>(x, work.batch_head, head, shape.seqlen_q, columns).rows(block.start, block.stop);
      };
      const auto load_q = [&](const Matrices& x) {
        __syncthreads();  // all threads have read the old contents of the tile, and the tile of weights
        tile::load(tiles.q, rows_of(x, shape.head_dim));
      };
      const auto load_do = [&](const Matrices& x) {
        __syncthreads();  // all threads have read the old contents of the tile, and the tile of weights
        // The gradients of a query without a key are 0, whatever its rows hold.
        tile::load(tiles.d_o, rows_of(x, shape.value_dim), [&](int row) {
          return lse.at(block.start + row, 0) != ptx::negative_infinity<Accumulator>();
        });
      };
      Scores s, s_dot, dp, dp_dot;
      clear_scores(s, s_dot, dp, dp_dot);
      if constexpr (Config::kHasQDot) {
        load_q(tangents.q_dot);
        __syncthreads();  // the rows have arrived, and K and V before the first step
        tile::gemm_add_nt(s_dot, tiles.k, tiles.q);
      }
      load_q(params.q);
      load_statistics(tiles.statistics, params, tangents, work.batch_head, block);
      __syncthreads();  // the rows and their statistics have arrived, and K and V before the first step
      tile::gemm_add_nt(s, tiles.k, tiles.q);
      if constexpr (Config::kHasKDot) tile::gemm_add_nt(s_dot, tiles.k_dot, tiles.q);
      if constexpr (Config::kHasDoDot) {
        load_do(tangents.do_dot);
        __syncthreads();  // the rows have arrived
        tile::gemm_add_nt(dp_dot, tiles.v, tiles.d_o);
      }
      load_do(params.do_);
      __syncthreads();  // the rows have arrived
      tile::gemm_add_nt(dp, tiles.v, tiles.d_o);
      if constexpr (Config::kHasVDot) tile::gemm_add_nt(dp_dot, tiles.v_dot, tiles.d_o);
      differentiate(s, s_dot, dp, dp_dot, tiles.statistics, score_function, dropout, params, work, block);
      tile::store(tiles.p, s_dot);
      __syncthreads();  // P_dot is stored
      tile::gemm_add_nn(dv, tiles.p, tiles.d_o);
      if constexpr (Config::kHasDoDot) {
        load_do(tangents.do_dot);
        tile::store(tiles.p, s);
        __syncthreads();  // P is stored, and the rows have arrived
        tile::gemm_add_nn(dv, tiles.p, tiles.d_o);
      }
      if constexpr (Config::kHasQDot) {
        load_q(tangents.q_dot);
        tile::store(tiles.p, dp);
        __syncthreads();  // dS is stored, and the rows have arrived
        tile::gemm_add_nn(dk, tiles.p, tiles.q);
      }
      load_q(params.q);
      tile::store(tiles.p, dp_dot);
      __syncthreads();  // dS_dot is stored, and the rows have arrived
      tile::gemm_add_nn(dk, tiles.p, tiles.q);
    }
  }
  write_results(params, work, kv_head, dk, dv, dropout);
}
