// The first kernel of FlashAttention-3's backward pass (arXiv 2407.08608, appendix B). For each tile of queries, it
// computes the QueryStats that the backward kernels load by one bulk copy: lse in base 2 and delta = rowsum(dO o O) -
// dlse, which is 0 in rows without a key. It sets sums of dQ to 0 if no tile of keys stores them.
#include <attention/delta.cuh>
#include <sm90/dq_semaphore.cuh>
#include <sm90/query_stats.cuh>

namespace cuflash::sm90 {

struct BackwardStatistics : QueryTileStats<Config> {
  // Compute the statistics of a tile of queries except delta. Called by a warp.
  static CUFLASH_DEVICE void compute_query_stats(QueryStats& stats, const attention::Params& params,
                                                 const attention::WorkTile& work) {
    using namespace attention;
    const auto lse = matrix<float>(params.lse, work.batch_head, work.batch_head.head, params.shape.seqlen_q, 1);
    bool has_large = false, has_empty_row = false;
    for (int first = 0; first < kBlockQ; first += 32) {
      const int row = first + ptx::lane();
      const bool in_bounds = work.first + row < work.last;
      const float lse_2 = in_bounds ? lse_in_base_2(lse.at(work.first + row, 0)) : -ptx::negative_infinity<float>();
      stats.lse_2[row] = lse_2;
      if (!in_bounds) stats.delta[row] = 0;
      const bool is_nonempty = lse_2 != -ptx::negative_infinity<float>();
      has_empty_row |= in_bounds && !is_nonempty;
      has_large |= is_nonempty && fabsf(lse_2) > kLargestPlainLse2;
      const uint32_t nonempty = __ballot_sync(0xffffffffu, is_nonempty);
      if (ptx::lane() < 2) stats.nonempty[first / 16 + ptx::lane()] = nonempty >> 16 * ptx::lane() & 0xffff;
    }
    has_large = __any_sync(0xffffffffu, has_large);
    has_empty_row = __any_sync(0xffffffffu, has_empty_row);
    if (ptx::lane() != 0) return;
    stats.has_large_lse = has_large;
    stats.has_empty_rows = has_empty_row;
    stats.visitors = {};
  }

  // Call write(row, delta) for each row of a full tile with full rows, and return true. Return false for other tiles,
  // which for_each_delta handles. A thread loads a few chunks of O and of dO at a time, which saves 2 % of a causal
  // backward pass of 1024 tokens at 64 columns (step 28 of sm90_steps.log at commit b648872e).
  template <class Write>
  static CUFLASH_DEVICE bool for_each_delta_of_full_tile(const attention::Params& params,
                                                         const attention::WorkTile& work, Write write) {
    using namespace attention;
    using Chunk = tile::Chunk<Element>;
    using Partition = tile::ChunkPartition<kThreads, OTile>;
    constexpr int kWidth = OTile::kChunk * Partition::kThreadsPerRow, kHeight = Partition::kRowsPerPass;
    if constexpr (kValueDim % kWidth != 0 || kBlockQ % kHeight != 0) {
      return false;
    } else {
      // numbers of chunks per row, and of rows, that a thread loads
      constexpr int kChunksPerThread = kValueDim / kWidth, kRowsPerThread = kBlockQ / kHeight;
      // number of rows loaded at a time; if it were all rows, ptxas would spill registers
      constexpr int kRowsInFlight = kChunksPerThread * kRowsPerThread <= 4 ? (kRowsPerThread + 1) / 2
                                    : kChunksPerThread < 4                 ? 4 / kChunksPerThread
                                                                           : 1;
      static_assert(kRowsPerThread % kRowsInFlight == 0, "a thread loads all of its rows");
      const Shape& shape = params.shape;
      const BatchHead& batch_head = work.batch_head;
      const auto o = matrix<Element>(params.o, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
      const auto d_o = matrix<Element>(params.do_, batch_head, batch_head.head, shape.seqlen_q, shape.value_dim);
      if (!tile::has_aligned_chunks(o) || !tile::has_aligned_chunks(d_o) || shape.value_dim != kValueDim ||
          work.last - work.first != kBlockQ)
        return false;
      const auto lse = matrix<float>(params.lse, batch_head, batch_head.head, shape.seqlen_q, 1);
      const auto dlse = matrix<float>(params.dlse, batch_head, batch_head.head, shape.seqlen_q, 1);
      const int first_column = Partition::first_chunk() * OTile::kChunk;
#pragma unroll 1
      for (int row = work.first + Partition::first_row(); row < work.last; row += kRowsInFlight * kHeight) {
        Chunk a[kRowsInFlight][kChunksPerThread], b[kRowsInFlight][kChunksPerThread];
        float row_lse[kRowsInFlight];
#pragma unroll
        for (int x = 0; x < kRowsInFlight; ++x) {
          row_lse[x] = lse.at(row + x * kHeight, 0);
#pragma unroll
          for (int c = 0; c < kChunksPerThread; ++c) {
            a[x][c] = reinterpret_cast<const Chunk&>(o.at(row + x * kHeight, first_column + c * kWidth));
            b[x][c] = reinterpret_cast<const Chunk&>(d_o.at(row + x * kHeight, first_column + c * kWidth));
          }
        }
#pragma unroll
        for (int x = 0; x < kRowsInFlight; ++x) {
          float sum = 0;
#pragma unroll
          for (int c = 0; c < kChunksPerThread; ++c)
#pragma unroll
            for (int e = 0; e < OTile::kChunk; ++e)
              sum += tile::to_accumulator(a[x][c].at[e]) * tile::to_accumulator(b[x][c].at[e]);
#pragma unroll
          for (int lane_offset = 1; lane_offset < Partition::kThreadsPerRow; lane_offset *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, lane_offset);
          if (first_column != 0) continue;
          const int own = row + x * kHeight;
          const bool is_empty = row_lse[x] == ptx::negative_infinity<float>();
          write(own, is_empty ? 0.0f : params.dlse.data == nullptr ? sum : sum - dlse.at(own, 0));
        }
      }
      return true;
    }
  }

  // The body of the kernel.
  static CUFLASH_DEVICE void run(const attention::Params& params, const QueryState& query_state) {
    reset_tile_counter(params);
    const WorkTile work = own_query_tile(params);
    if (work.is_empty()) return;
    if (work.first == 0 && threadIdx.x == 0) reset_dq_semaphore(params, query_state, work.batch_head);
    const int number = own_query_number(params, work);
    auto& record = query_records(query_state, work.batch_head)[number];
    QueryStats& stats = record.stats;
    if (threadIdx.x < 32) {
      compute_query_stats(stats, params, work);
      if constexpr (kCountsDqTiles)
        if (threadIdx.x == 0) *dq_count(record) = {};
      if constexpr (Config::kLastFinishesDq) store_num_visitors<Config>(params, work, stats.visitors);
      if constexpr (Config::kAddsDqInOrder)
        if (threadIdx.x == 0) stats.visitors.last = last_visiting_key_tile<kBlockKv>(params, work);
    }
    ptx::compiler_barrier();  // keeps ptxas from moving loads to an earlier place, which would spill registers
    const auto write = [&](int row, float sum) { stats.delta[row - work.first] = sum; };
    if (!for_each_delta_of_full_tile(params, work, write)) for_each_delta(params, work, write);
    if (!kCountsDqTiles && !stores_dq<kBlockKv>(params, work)) clear_dq_sum(params, work, number);
  }
};

}  // namespace cuflash::sm90

extern "C" __global__ void __launch_bounds__(cuflash::sm90::BackwardStatistics::kThreads)
sm90_backward_statistics(const __grid_constant__ cuflash::attention::Params params,
                         const __grid_constant__ cuflash::sm90::QueryState query_state) {
  using namespace cuflash;
  using namespace cuflash::sm90;
  BackwardStatistics::run(params, query_state);
}
