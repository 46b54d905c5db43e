// The rows' half of FlashAttention-2's backward pass (arXiv 2307.08691, algorithm 2) as FlashAttention-3 multiplies
// (arXiv 2407.08608): dQ of 64 queries, which nobody adds to, P recomputed from lse. One warpgroup of a block brings Q, dO,
// and K and V step after step; the other multiplies. P, dS and dQ stay in registers. Another block of the multiprocessor
// multiplies while this one reckons.
#include <attention/fragment_gradient.cuh>
#include <attention/known_queries.cuh>
#include <attention/warpgroup_gradient.cuh>

namespace cuflash {
constexpr bool kBringsDo = true;
}  // namespace cuflash
#include <attention/key_ring.cuh>

namespace cuflash {

constexpr int kProducerRegisters = 56, kConsumerRegisters = 200;  // 128 each, moved: as many as a block starts with
static_assert(kProducerRegisters + kConsumerRegisters <= 2 * 128, "else a group waits for ever");
static_assert(kConsumers == 1 && kThreads == 2 * kGroup, "a warpgroup has 64 queries");

using Scores = tile::WarpTile<1, kBlockKv / 8, 4>;
using Gradient = tile::WarpTile<1, kHeadDim / 8, 4>;
using RoundedScores = tile::Rounded<Element, Scores>;  // dS
using Statistics = attention::RowStatistics<Scores>;

CUFLASH_DEVICE void write_nothing(const attention::Params& params, const attention::WorkTile& work,
                                  attention::SinkArgument) {
  using namespace attention;
  const int head = work.place.head, num_columns = params.shape.head_dim;
  if (params.dq.is_wide) tile::clear(matrix<float>(params.dq, work.place, head, 0, num_columns).rows(work.first, work.last));
  else tile::clear(matrix<Element>(params.dq, work.place, head, 0, num_columns).rows(work.first, work.last));
}

// lse and delta of a thread's rows, which the kernel before left by tiles; without a list these are cut from the first query
// on, and this kernel's from the last.
CUFLASH_DEVICE Statistics row_statistics(const attention::Params& params, const attention::WorkTile& work) {
  const KnownQueries* const all = known_queries(params, work.place);
  Statistics row;
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const int query = work.first + Scores::first_row() + Scores::row(i);
    const int first = config::kIsListed ? work.first : query / kBlockQ * kBlockQ;
    const bool is_there = query < work.last;
    const KnownQueries& known = all[is_there ? attention::query_tile_number<Listed>(params, first, kBlockQ) : 0];
    row.lse_2[i] = is_there ? known.lse_2[query - first] : -ptx::negative_infinity<float>();
    row.delta[i] = is_there ? known.delta[query - first] : 0;
  }
  return row;
}

// P in the place of q k^T; what is masked stays marked.
template <bool IsPlain>
CUFLASH_DEVICE void make_probabilities(Scores& s, const Statistics& row, float softmax_scale_log2) {
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float p = attention::probability(s.at(i, j), softmax_scale_log2, row.lse_2[i]);
      s.at(i, j) = IsPlain || !attention::is_masked_score(s.at(i, j)) ? p : s.at(i, j);
    }
}

// dS in the place of dP, which may be anything where P is masked.
template <bool IsPlain>
CUFLASH_DEVICE void make_gradients(Scores& p, Scores& dp, const Statistics& row) {
#pragma unroll
  for (int j = 0; j < Scores::kColumns; ++j)
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float ds = p.at(i, j) * (dp.at(i, j) - row.delta[i]);
      dp.at(i, j) = IsPlain || !attention::is_masked_score(p.at(i, j)) ? ds : 0.0f;
    }
}

// Numbers count steps that were read.

CUFLASH_DEVICE void start_scores(Scores& s, unsigned num_keys) {
  const int stage = stage_of(num_keys);
  tile::await_full(board().k[stage], parity_of(num_keys));
  tile::start_product_nt(s, tile::RowsAlongSum<QPanels>(q_smem(0)), tile::RowsAlongSum<KPanels>(k_smem(stage)));
}
CUFLASH_DEVICE void start_dp(Scores& dp, unsigned num_keys) {
  const int stage = stage_of(num_keys);
  tile::await_full(board().v[stage], parity_of(num_keys));
  tile::start_product_nt(dp, tile::RowsAlongSum<DoPanels>(do_smem(0)), tile::RowsAlongSum<VPanels>(v_smem(stage)));
}

// Walk the keys of a tile. Scores and dP of the next step are multiplied behind this one's dQ, and P is made under dP. Q and
// dO are left once the last dP is there, and leave room for the next tile's while its results are written.
CUFLASH_DEVICE void walk(const attention::Params& params, Gradient& dq, const Task& task, unsigned& num_keys) {
  Board& own = board();
  Scores s, dp;
  start_scores(s, num_keys);
  start_dp(dp, num_keys);
  const Statistics row = row_statistics(params, task.work);  // asked for meanwhile
  tile::wait_for<1>(s);
  while (true) {
    const int stage = stage_of(num_keys), kind = kind_for(0, num_keys);
    const bool is_plain = kind & Note::kAsTheyAre;
    if (is_plain) {
      make_probabilities<true>(s, row, own.softmax_scale_log2);
    } else {
      mask_step(params, s, task, own.notes[stage]);
      make_probabilities<false>(s, row, own.softmax_scale_log2);
    }
    tile::wait_for<0>(dp);
    tile::arrive(own.v[stage].empty);
    if (is_plain) make_gradients<true>(s, dp, row);
    else make_gradients<false>(s, dp, row);
    RoundedScores ds;
    ds = dp;
    tile::start_sum_nn(dq, ds, tile::RowsAcrossSum<KPanels>(k_smem(stage)));
    ++num_keys;
    if (kind & Note::kEndsTile) break;
    start_scores(s, num_keys);
    start_dp(dp, num_keys);
    tile::wait_for<1>(s);
    ptx::keep_in_place(tile::accumulators(dq));
    tile::keep_in_place(ds);
    tile::arrive(own.k[stage].empty);
  }
  tile::arrive(own.q[0].empty);
  tile::wait_for<0>(dq);
  tile::arrive(own.k[stage_of(num_keys - 1)].empty);
}

CUFLASH_DEVICE void consume(const attention::Params& params) {
  unsigned num_keys = 0;
  for (unsigned num_tasks = 0; await_tile(num_tasks); ++num_tasks) {
    const Task& task = board().tasks[task_of(num_tasks)];
    Gradient dq;
    dq.fill(0);
    walk(params, dq, task, num_keys);
    dq.scale(params.shape.softmax_scale);
    write_gradient(params.dq, task.work, task.work.place.head, params.shape.head_dim, dq);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::config::kMinBlocks)
sm90_backward_rows(const __grid_constant__ cuflash::attention::Params params,
                   const __grid_constant__ cuflash::attention::TensorMaps maps) {
  using namespace cuflash;
  if (threadIdx.x == 0) {
    make_barriers();
    board().softmax_scale_log2 = params.shape.softmax_scale * attention::kLog2E;
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    produce(params, maps, attention::sink);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(params);
  }
}
