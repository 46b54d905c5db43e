#pragma once
#include <attention/score_gradient.cuh>
#include <sm90/dq_arrivals.cuh>
#include <sm90/epilogue_gradient.cuh>
#include <sm90/query_state.cuh>

// The statistics of a tile of queries that backward kernels on Hopper read. One bulk copy loads them, so shared memory
// has the layout of global memory.
namespace cuflash::sm90 {

template <class Config>
struct QueryTileStats : GradientEpilogue<Config> {
  using Base = GradientEpilogue<Config>;
  using typename Base::Listed;
  using Base::kBlockQ, Base::kHeadDim, Base::kValueDim;

  // 16 bits per word: kernels with a watchdog could mistake 32-bit words for NaN
  static constexpr int kNonemptyWords = kBlockQ / 16;
  struct alignas(16) QueryStats {
    float lse_2[kBlockQ];  // lse in base 2; +inf for queries without a key, and past the tile
    float delta[kBlockQ];
    uint32_t nonempty[kNonemptyWords];  // a bit for each query, set if the query has a key
    int has_large_lse;  // whether some lse_2 exceeds kLargestPlainLse2
    int has_empty_rows;  // whether some query has no key
    DqVisitors visitors;

    static CUFLASH_DEVICE bool is_nonempty(const uint32_t* nonempty, int row) {
      return nonempty[row / 16] >> row % 16 & 1;
    }
  };
  // Whether tiles of keys are counted at a tile of queries: as they arrive, or as they are done in order
  // (sm90/dq_arrivals.cuh).
  static constexpr bool kCountsDqTiles = Config::kLastFinishesDq || Config::kAddsDqInOrder;
  // The record of a tile in global memory: its statistics, followed by the count, which is not copied with them.
  struct PlainRecord {
    QueryStats stats;
  };
  struct CountingRecord {
    QueryStats stats;
    DqCount dq;
  };
  using QueryRecord = tile::Conditional<kCountsDqTiles, CountingRecord, PlainRecord>;
  // If lse in base 2 is larger than this, its rounding error may raise P above 1 by more than a thousandth.
  static constexpr float kLargestPlainLse2 = 1 << 14;

  // Return the tile of queries that a thread block works on. The second function returns the index of the tile's
  // statistics and sums of dQ.
  static CUFLASH_DEVICE attention::WorkTile own_query_tile(const attention::Params& params) {
    if constexpr (Config::kCutsSequences) return query_part_reversed<kBlockQ>(params).work;
    else return attention::query_tile_reversed<Listed>(params, kBlockQ);
  }
  template <class L = Listed>
  static CUFLASH_DEVICE int own_query_number(const attention::Params& params, const attention::WorkTile& work) {
    if constexpr (Config::kCutsSequences) return query_part_reversed<kBlockQ>(params).number;
    else return attention::query_tile_number<L>(params, work.first, kBlockQ);
  }

  // Return the count of a record, or null in kernels without counts.
  static CUFLASH_DEVICE DqCount* dq_count(QueryRecord& record) {
    if constexpr (kCountsDqTiles) return &record.dq;
    else return nullptr;
  }

  // Return the record of a matrix's first tile; those of its other tiles follow it.
  static CUFLASH_DEVICE QueryRecord* query_records(const QueryState& query_state,
                                                   const attention::BatchHead& batch_head) {
    return reinterpret_cast<QueryRecord*>(
        attention::matrix<float>(query_state.query_stats, batch_head, batch_head.head, 0, 0).data);
  }
};

}  // namespace cuflash::sm90
