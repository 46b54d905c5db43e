// FlashAttention-1's backward pass (arXiv 2205.14135, algorithm 4) on the tensor cores of Ampere. A thread block works
// on one key/value head. Its outer loop holds a tile of K and V in shared memory, and dK and dV of these keys in
// registers; its inner loop visits the queries that attend them. Each inner iteration reads dQ of a tile of queries
// from global memory and writes it back.
#include <attention/delta.cuh>
#include <attention/empty_rows.cuh>
#include <attention/epilogue_mma.cuh>
#include <fa1/running.cuh>
#include <ptx/cp_async.cuh>

namespace cuflash::fa1 {

constexpr int kNumStages = Config::kNumStages;

using Scores = tile::WarpPartition<kBlockQ, kBlockKv, kNumWarps>::Tile;
using WarpDk = tile::WarpPartition<kBlockKv, kHeadDim, kNumWarps>::Tile;
using WarpDv = tile::WarpPartition<kBlockKv, kValueDim, kNumWarps>::Tile;

constexpr KTile k_smem{0};
constexpr VTile v_smem{KTile::kBytes};
constexpr int kQOffset = v_smem.start + VTile::kBytes;  // stages of Q, followed by the stages of dO
constexpr int kDoOffset = kQOffset + kNumStages * QTile::kBytes;
constexpr PTile p_smem{kDoOffset + kNumStages * OTile::kBytes};
constexpr PTile ds_smem{p_smem.start + PTile::kBytes};
constexpr int kStateOffset = ds_smem.start + PTile::kBytes;

// Return a query head by its index in the group that shares the block's key/value head.
CUFLASH_DEVICE attention::BatchHead query_head(const attention::Params& params, int number) {
  attention::BatchHead batch_head = attention::own_kv_batch_head(params);
  batch_head.head += number;
  return batch_head;
}

// Return lse or delta of a block of queries.
CUFLASH_DEVICE tile::Matrix<float> rows_of_queries(const attention::Matrices& matrices,
                                                   const attention::BatchHead& batch_head,
                                                   const attention::KvBlock& queries) {
  return attention::matrix<float>(matrices, batch_head, batch_head.head, queries.stop, 1)
      .rows(queries.start, queries.stop);
}

// Start copying Q and dO of an inner iteration.
CUFLASH_DEVICE void load_queries(const attention::Params& params, const attention::BatchHead& batch_head,
                                 const attention::KvBlock& queries, int stage) {
  const attention::Shape& shape = params.shape;
  const auto load = [&](auto to, const attention::Matrices& matrices, int num_columns) {
    const auto all = attention::matrix<Element>(matrices, batch_head, batch_head.head, shape.seqlen_q, num_columns);
    tile::load_async<kThreads>(to, all.rows(queries.start, queries.stop));
  };
  load(QTile{kQOffset + stage * QTile::kBytes}, params.q, shape.head_dim);
  load(OTile{kDoOffset + stage * OTile::kBytes}, params.do_, shape.value_dim);
}

// Start copying V of a tile of keys.
CUFLASH_DEVICE void load_v(const attention::Params& params, const attention::WorkTile& keys) {
  const attention::Shape& shape = params.shape;
  const int kv_head = attention::divmod(keys.batch_head.head, shape.group_size).quotient;
  const auto all = attention::matrix<Element>(params.v, keys.batch_head, kv_head, shape.seqlen_kv, shape.value_dim);
  tile::load_async<kThreads>(v_smem, all.rows(keys.first, keys.last));
}

// Write delta = rowsum(dO o O) - dlse of all queries of a head and set dQ = 0: lines 5 and 19 of algorithm 4, except
// that delta is computed once per query instead of once per iteration.
CUFLASH_DEVICE void begin_head(const attention::Params& params, const attention::BatchHead& batch_head) {
  const int length = params.shape.seqlen_q;
  const auto delta = attention::matrix<float>(params.delta, batch_head, batch_head.head, length, 1);
  for_each_delta(params, {batch_head, 0, length}, [&](int row, float sum) { delta.at(row, 0) = sum; });
  clear_sums(params, params.dq_sum, batch_head, kBlockQ * kHeadDim);
}

// Run one inner iteration, lines 11 to 22 of algorithm 4: add a tile of queries to dK and dV, and a tile of keys to dQ.
CUFLASH_DEVICE void add_queries(const attention::Params& params, const attention::WorkTile& keys,
                                const attention::KvBlock& queries, QTile q_smem, OTile do_smem, WarpDk& dk,
                                WarpDv& dv) {
  using namespace attention;
  const auto lse = rows_of_queries(params.lse, keys.batch_head, queries);
  const auto delta = rows_of_queries(params.delta, keys.batch_head, queries);
  const float softmax_scale_log2 = params.shape.softmax_scale * kLog2E;
  Scores s, dp;
  tile::gemm_nt(s, q_smem, k_smem);
  if (fills_tiles(keys, queries)) {
    tile::gemm_nt(dp, do_smem, v_smem);
    score_gradients<false>(s, dp, softmax_scale_log2, row_statistics<Scores>(lse, delta));
  } else {
    mask_iteration(s, params, keys, queries, masked_score());
    clear_empty_rows(do_smem, lse);
    tile::gemm_nt(dp, do_smem, v_smem);
    score_gradients<true>(s, dp, softmax_scale_log2, row_statistics<Scores>(lse, delta));
  }
  if (Scores::is_first_owner()) {
    tile::store(p_smem, s);
    tile::store(ds_smem, dp);
  }
  __syncthreads();  // all of P and dS is stored
  tile::gemm_add_tn(dv, p_smem, do_smem);
  tile::gemm_add_tn(dk, ds_smem, q_smem);
  const auto sums = sums_of_tile<WarpDq>(params, params.dq_sum, keys.batch_head, queries.start);
  WarpDq dq, added;
  tile::gemm_nn(added, ds_smem, k_smem);
  ptx::compiler_barrier();  // loads of dQ that started earlier would take registers from dK and dV
  sums.load(dq);
#pragma unroll
  for (int i = 0; i < WarpDq::kRows; ++i)
#pragma unroll
    for (int j = 0; j < WarpDq::kColumns; ++j) dq.at(i, j) += added.at(i, j);
  sums.store(dq);
}

// Run the inner loop: add all queries of one head that attend a tile of keys. The caller has started the copies of the
// tile's K and V.
CUFLASH_DEVICE void add_head(const attention::Params& params, const BlockState& state, WarpDk& dk, WarpDv& dv) {
  using namespace attention;
  const WorkTile& keys = state.keys;
  BlockIterator<kBlockQ, OverQBlocks, Listed> blocks(params, state.visit_range);
  KvBlock block, next_block;
  bool has_block = blocks.next(block);
  if (has_block) load_queries(params, keys.batch_head, block, 0);
  ptx::cp_async_commit();
  for (int stage = 0; has_block; stage = kNumStages - 1 - stage) {
    const bool has_next_block = blocks.next(next_block);
    ptx::cp_async_wait<0>();
    // Q and dO have arrived, and K and V before the first iteration; all threads have read P and dS of the last
    // iteration
    __syncthreads();
    if (kNumStages == 2 && has_next_block) load_queries(params, keys.batch_head, next_block, 1 - stage);
    ptx::cp_async_commit();
    add_queries(params, keys, block, QTile{kQOffset + stage * QTile::kBytes},
                OTile{kDoOffset + stage * OTile::kBytes}, dk, dv);
    if (kNumStages == 1) {
      __syncthreads();  // all warps have read Q and dO
      if (has_next_block) load_queries(params, keys.batch_head, next_block, 0);
      ptx::cp_async_commit();
    }
    block = next_block;
    has_block = has_next_block;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // K, V, Q and dO have arrived, even without an iteration, and all threads have read them
}

// Write dQ, scaled, in the dtype of Q.
CUFLASH_DEVICE void write_dq(const attention::Params& params, const attention::BatchHead& batch_head) {
  using namespace attention;
  const Tiling query_tiles = query_tiling(params, kBlockQ);
  for (int number = 0; number < query_tiles.num_tiles(); ++number) {
    const Range queries = query_tiles.tile(number);
    if (queries.is_empty()) continue;
    WarpDq dq;
    sums_of_tile<WarpDq>(params, params.dq_sum, batch_head, queries.first).load(dq);
    dq.scale(params.shape.softmax_scale);
    __syncthreads();  // all threads have read the previously staged tile
    write_gradient(params.dq, {batch_head, queries.first, queries.last}, batch_head.head, params.shape.head_dim,
                   QTile{kQOffset}, dq);
  }
}
constexpr int kSharedBytes = kStateOffset + static_cast<int>(sizeof(BlockState));

}  // namespace cuflash::fa1

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
fa1_backward(const __grid_constant__ cuflash::attention::Params params) {
  using namespace cuflash;
  using namespace cuflash::fa1;
  using namespace cuflash::attention;
  const Shape& shape = params.shape;
  auto& state = *reinterpret_cast<BlockState*>(ptx::dynamic_shared<unsigned char>() + kStateOffset);
  for (int head = 0; head < shape.group_size; ++head) begin_head(params, query_head(params, head));
  const Tiling key_tiles = key_tiling(params, kBlockKv);
  for (int number = 0; number < key_tiles.num_tiles(); ++number) {
    if (key_tiles.tile(number).is_empty()) continue;
    WarpDk dk;
    WarpDv dv;
    dk.fill(0);
    dv.fill(0);
    for (int head = 0; head < shape.group_size; ++head) {
      const Range range = key_tiles.tile(number);
      __syncthreads();  // delta and dQ are written; all threads have finished reading shared memory
      begin_keys(params, {query_head(params, head), range.first, range.last}, state);
      __syncthreads();  // the state is stored
      if (head == 0) load_v(params, state.keys);
      if (head == 0 || params.work.interval_head_stride != 0)  // the mask depends on the head
        load_visible_rows(params, state.keys, k_smem, params.k, shape.head_dim);
      add_head(params, state, dk, dv);
    }
    const int kv_head = divmod(state.keys.batch_head.head, shape.group_size).quotient;
    dk.scale(shape.softmax_scale);
    stage_gradient(params.dk, state.keys, kv_head, shape.head_dim, k_smem, dk);
    stage_gradient(params.dv, state.keys, kv_head, shape.value_dim, v_smem, dv);
    __syncthreads();  // all of dK and dV is stored
    write_staged_gradient(params.dk, state.keys, kv_head, shape.head_dim, k_smem);
    write_staged_gradient(params.dv, state.keys, kv_head, shape.value_dim, v_smem);
  }
  __syncthreads();  // all of dQ is written
  for (int head = 0; head < shape.group_size; ++head) write_dq(params, query_head(params, head));
}
