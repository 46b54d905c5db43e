#pragma once
#include <attention/config_mma.cuh>
#include <attention/mass_grid.cuh>
#include <attention/score.cuh>

// The softmax mass of every block of a grid: exp(s - lse) summed over the keys and the queries of the block. A thread
// block owns whole rows of the grid, so that no two thread blocks add to the same mass, and visits the keys of their
// queries once. The lse of a query may be known only after its last key. Therefore the sum of its weights over each
// block of keys is stored in global memory as a logarithm, and these sums are added over the queries of a block
// afterwards. Kernels differ in how they copy and multiply rows of q and k.
namespace cuflash {

constexpr int kNumStages = Config::kNumStages;
constexpr bool kSplitsHeadDim = Config::kSplitsHeadDim;

// The thread block may have more warps than those that hold scores.
constexpr int kRowTiles = kBlockQ / (16 * kNumWarps) + (kBlockQ < 16 * kNumWarps);
using Scores = tile::WarpTile<kRowTiles, kBlockKv / 8, kBlockQ / (16 * kRowTiles)>;
using Softmax = attention::LazySoftmax<Scores::kRows>;

// Logarithms, in base 2, of the sums of a query's weights over each block of keys: [num_kv_blocks, kBlockQ].
struct RowMasses {
  float* data;

  CUFLASH_DEVICE float& at(int kv_block, int row) const { return data[static_cast<int64_t>(kv_block) * kBlockQ + row]; }

  // Set all sums to 0. Called by all threads.
  CUFLASH_DEVICE void clear(int num_kv_blocks) const {
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(num_kv_blocks) * kBlockQ; i += kThreads)
      data[i] = ptx::negative_infinity<float>();
  }
};

// A tile of queries, its lse in base 2 (infinite for queries without a key), and the index of the next rows of the
// grid.
struct MassTile {
  float row_shift[kBlockQ];
  int next_number;
  attention::WorkTile work;
  attention::VisitRange visit_range;
};

// The sums of a walk over keys, in the order of the keys. The row sums of `softmax` are those of the key block in which
// the last step was. Member functions are called by whole warps.
class KeySums {
 public:
  Softmax softmax;

  CUFLASH_DEVICE KeySums(const RowMasses& row_masses, const attention::MassGrid& grid, float scale_log2)
      : row_masses_(row_masses), scale_log2_(scale_log2), block_kv_(static_cast<int>(grid.block_kv)) {}

  // Begin a step.
  CUFLASH_DEVICE void open(const attention::KvBlock& block) {
    if (block.start < stop_) return;
    close();
    number_ = block.start == stop_ ? number_ + 1 : block.start / block_kv_;
    stop_ = (number_ + 1) * block_kv_;
  }

  // Return whether a step that has begun ends within the current block of keys.
  CUFLASH_DEVICE bool holds(const attention::KvBlock& block) const { return block.stop <= stop_; }

  // Replace the scores of a step within one key block by weights under the old maxima, and sum the weights. Return
  // false, with the scores overwritten, if maxima must be updated.
  CUFLASH_DEVICE bool try_add_with_stale_max(Scores& s) { return softmax.try_exp_with_stale_max(s, scale_log2_); }

  // Replace the scores of a step that has begun by weights, and sum them.
  CUFLASH_DEVICE void add(Scores& s, const attention::KvBlock& block) {
    float factor[Scores::kRows];
    if (softmax.update_max(s, scale_log2_, factor)) {
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) sum_before_[i] *= factor[i];
    }
    if (softmax.max_reasons & Softmax::kLargeMax) softmax.subtract_max(s);
    if (holds(block)) return softmax.exp_scores(s, scale_log2_);
    float sum[Scores::kRows];
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) sum[i] = softmax.row_sum[i];
    softmax.exp_scores(s, scale_log2_);
    add_parts(s, block, sum);
  }

  // End the walk: the row sums of `softmax` then cover all keys.
  CUFLASH_DEVICE void finish() {
    close();
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) softmax.row_sum[i] = sum_before_[i];
  }

 private:
  // Store the sums of rows over the key block that has ended.
  CUFLASH_DEVICE void close() {
    if (number_ < 0) return;
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const float sum = tile::quad_sum(softmax.row_sum[i]);
      sum_before_[i] += softmax.row_sum[i];
      softmax.row_sum[i] = 0;
      if (Scores::first_column() == 0)
        row_masses_.at(number_, Scores::first_row() + Scores::row(i)) =
            softmax.row_max[i] * scale_log2_ + ptx::log2_accurate(sum);
    }
  }

  // Add the weights of a step that spans several key blocks. `sum` is the sum of earlier steps over the first of these
  // blocks.
  CUFLASH_DEVICE void add_parts(Scores& p, const attention::KvBlock& block, float (&sum)[Scores::kRows]) {
    if ((block_kv_ | block.start) % 8 == 0) return add_eights(p, block, sum);
#pragma unroll 1
    for (int start = block.start;;) {
      const int stop = min(stop_, block.stop);
      const bool is_last = stop == block.stop;
      const uint32_t columns = columns_from(start - block.start) & ~(is_last ? 0 : columns_from(stop - block.start));
#pragma unroll
      for (int j = 0; j < Scores::kColumns; ++j) {
        if (!(columns >> j & 1)) continue;
#pragma unroll
        for (int i = 0; i < Scores::kRows; ++i) sum[i] += p.at(i, j);
      }
      put_sums(sum);
      if (is_last) return;
      next_block();
      start = stop;
    }
  }

  // Add the weights of a step that spans several key blocks. Each block must end at a multiple of eight columns of the
  // tile.
  CUFLASH_DEVICE void add_eights(Scores& p, const attention::KvBlock& block, float (&sum)[Scores::kRows]) {
#pragma unroll
    for (int j = 0; j < Scores::kColumns; j += 2) {
      const int key = block.start + Scores::column(j);
      if (key >= block.stop) break;
      if (key == stop_) {
        put_sums(sum);
        next_block();
      }
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) sum[i] += p.at(i, j) + p.at(i, j + 1);
    }
    put_sums(sum);
  }

  CUFLASH_DEVICE void put_sums(float (&sum)[Scores::kRows]) {
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      softmax.row_sum[i] = sum[i];
      sum[i] = 0;
    }
  }
  CUFLASH_DEVICE void next_block() {
    close();
    ++number_;
    stop_ += block_kv_;
  }

  // Return one bit for each of the thread's columns of a step, set if the column is at or after `column`. Weights past
  // the last key are 0, so their bits do not matter.
  static CUFLASH_DEVICE uint32_t columns_from(int column) {
    static_assert(Scores::kColumns <= 32 && Scores::column(2) == 8, "each of a thread's columns has a bit");
    const int own = column - Scores::first_column();
    return ptx::bits_at_or_above((own >> 3) * 2 + min(own & 7, 2));
  }

  RowMasses row_masses_;
  float scale_log2_;
  int block_kv_, number_ = -1, stop_ = 0;  // number and end of the current key block
  float sum_before_[Scores::kRows] = {};  // sums over the thread's columns in earlier blocks
};

// Sum the masses of single queries over the queries of each block. Called by all threads, between barriers.
CUFLASH_DEVICE void add_masses(const attention::Params& params, const attention::MassGrid& grid,
                               const RowMasses& row_masses, const MassTile& tile) {
  constexpr int kAtOnce = 4;  // number of key blocks whose logarithms a warp loads together
  const attention::WorkTile& work = tile.work;
  const attention::BlockCuts queries{work.first, work.last, static_cast<int>(grid.block_q)};
  const auto mass = attention::matrix<float>(grid.mass, work.batch_head, work.batch_head.head, 0, 0);
  const int num_kv_blocks = grid.num_kv_blocks(params.shape), num_blocks = queries.count();
  const int number = threadIdx.x % 32;  // the thread's index in its warp
  for (int n = 0; n < num_blocks; ++n)
    for (int first = threadIdx.x / 32; first < num_kv_blocks; first += kAtOnce * kNumWarps) {
      float sum[kAtOnce] = {};
      const int start = queries.start(n), stop = queries.stop(n);
#pragma unroll 2
      for (int row = start + number; row < stop; row += 32)
#pragma unroll
        for (int x = 0; x < kAtOnce; ++x) {
          const int kv_block = min(first + x * kNumWarps, num_kv_blocks - 1);
          sum[x] += ptx::exp2_approx(row_masses.at(kv_block, row) - tile.row_shift[row]);
        }
#pragma unroll
      for (int x = 0; x < kAtOnce; ++x) {
        sum[x] = tile::warp_sum(sum[x]);
        const int kv_block = first + x * kNumWarps;
        if (number == 0 && kv_block < num_kv_blocks) mass.at(queries.first_block() + n, kv_block) += sum[x];
      }
    }
}

// An empty output, passed to `LazySoftmax::finalize` instead of O.
struct NoOutput {
  CUFLASH_DEVICE void scale_row(int, float) const {}
};

// Store lse of a tile's queries for `add_masses`, and write it to global memory if it is not an input. Called by the
// warps that hold scores, after their walks.
CUFLASH_DEVICE void save_shifts(const attention::Params& params, const attention::MassGrid& grid,
                                const Softmax& softmax, float scale_log2, MassTile& tile) {
  const attention::WorkTile& work = tile.work;
  const attention::BatchHead& batch_head = work.batch_head;
  const auto lse = attention::matrix<float>(params.lse, batch_head, batch_head.head, params.shape.seqlen_q, 1)
      .rows(work.first, work.last);
  float row_lse[Scores::kRows];
  NoOutput none;
  softmax.finalize(none, scale_log2, row_lse);
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const int row = Scores::first_row() + Scores::row(i);
    if (Scores::first_column() != 0 || row >= lse.num_rows) continue;
    if (grid.has_lse) row_lse[i] = lse.at(row, 0);
    else lse.at(row, 0) = row_lse[i];
    const bool has_key = row_lse[i] != ptx::negative_infinity<float>();
    tile.row_shift[row] =
        has_key ? row_lse[i] * static_cast<float>(attention::kLog2E) : -ptx::negative_infinity<float>();
  }
}

// Store a tile in shared memory. Called by one thread.
CUFLASH_DEVICE void save_tile(const attention::Params& params, const attention::WorkTile& work, MassTile& tile) {
  tile.work = work;
  tile.visit_range = attention::visit_range_of_queries(params, work);
}

// Return the rows of a tile's queries. The second function returns the rows of the keys that they may see.
CUFLASH_DEVICE tile::Matrix<Element> queries_of(const attention::Params& params, const attention::WorkTile& work) {
  const attention::Shape& shape = params.shape;
  return attention::matrix<Element>(params.q, work.batch_head, work.batch_head.head, shape.seqlen_q, shape.head_dim)
      .rows(work.first, work.last);
}
CUFLASH_DEVICE tile::Matrix<Element> keys_of(const attention::Params& params, const attention::WorkTile& work) {
  const attention::Shape& shape = params.shape;
  const int head = attention::divmod(work.batch_head.head, shape.group_size).quotient;
  return attention::matrix<Element>(params.k, work.batch_head, head, shape.seqlen_kv, shape.head_dim);
}

// Complete the scores of a step: apply the score function, negate scores if the scale is not positive, and set masked
// scores to -inf.
template <class Score>
CUFLASH_DEVICE void finish_scores(Scores& s, const Score& score, const attention::Params& params,
                                  const attention::WorkTile& work, const attention::KvBlock& block) {
  using namespace attention;
  const Shape& shape = params.shape;
  if constexpr (kHasScore) score_of_queries(s, score, shape.softmax_scale, work, block, 1);
  else if (Softmax::needs_negation(shape.softmax_scale)) Softmax::negate(s, shape.softmax_scale);
  if (!is_unmasked<kBlockKv>(block))
    mask_scores<Config::kIsListed>(s, params, work, block, ptx::negative_infinity<float>());
}

// Call `add_tile` for all tiles that a thread block owns. `add_tile` stores lse and the sums of rows over key blocks.
template <class AddTile>
CUFLASH_DEVICE void add_all_tiles(const attention::Params& params, const attention::MassGrid& grid, MassTile& tile,
                                  AddTile add_tile) {
  using namespace attention;
  const int height = mass_queries(grid, kBlockQ), num_rows = num_query_rows(params, height);
  const int num_kv_blocks = grid.num_kv_blocks(params.shape);
  const RowMasses row_masses{grid.row_masses + thread_block() * static_cast<int64_t>(num_kv_blocks) * kBlockQ};
  for (int number = first_tile_number(); number < num_rows; number = tile.next_number) {
    const WorkTile owned = query_rows_at(params, height, number);
    clear_masses<float, kThreads>(grid, params.shape, owned);
    WorkTile work = owned;
    for (; work.first < owned.last; work.first = work.last) {
      work.last = min(query_tile_end<Listed>(params, work.first, kBlockQ), owned.last);
      __syncthreads();  // the previous tile is finished
      if (threadIdx.x == 0) {
        if (work.first == owned.first) tile.next_number = next_tile_number(params, num_rows);
        save_tile(params, work, tile);
      }
      row_masses.clear(num_kv_blocks);
      __syncthreads();  // the tile is stored
      add_tile(row_masses);
      __syncthreads();  // lse and the sums of rows are stored
      add_masses(params, grid, row_masses, tile);
    }
  }
}

}  // namespace cuflash
