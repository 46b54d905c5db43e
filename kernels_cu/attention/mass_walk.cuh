#pragma once
// Sums softmax weights over every block of a grid: exp(s - lse) over the keys and the queries of the block. A thread
// block owns whole rows of the grid, so that no two blocks add to one sum, and walks the keys of their queries once.
// lse of a query may be known only after the last key. So the sum of each query over each block of keys is stored in
// global memory as a logarithm; at the end these are summed over the queries of a block. If rows of q and k are longer
// than a tile, they are loaded in chunks of columns. `Product` defines how chunks are copied and multiplied: load_q and
// load_k start to copy a chunk, make_visible makes arrived data visible to products, and add adds a product to the
// scores.
#include <attention/config_mma.cuh>
#include <attention/mass_grid.cuh>
#include <attention/score.cuh>

namespace cuflash {

using config::kNumStages;
using config::kSplitsHeadDim;

constexpr int kRowTiles = kBlockQ / (16 * kNumWarps);
using Scores = tile::WarpTile<kRowTiles, kBlockKv / 8, kNumWarps>;
using Softmax = attention::LazySoftmax<Scores::kRows>;

// A message beside the K of a slot: the step of the chunk, and whether it is the step's last chunk. A chunk without a
// step ends the walk.
struct Chunk {
  attention::KvBlock block;
  bool has_block, is_last_of_block;
};

// State of a thread block that lies in shared memory, so that registers are left for accumulators.
struct TileState {
  float row_shift[kBlockQ];  // lse of the queries in base 2; +inf for queries without a key
  Chunk chunks[kNumStages];
  tile::Matrix<Element> q, k;
  attention::WorkTile work;
  attention::VisitRange visit_range;
};

// Places of the chunks in shared memory. Q stays in the first slot, unless it is loaded in chunks as K is.
constexpr int kNumQSlots = kSplitsHeadDim ? kNumStages : 1;
constexpr int kKeysOffset = kNumQSlots * QTile::kBytes;
constexpr int kStateOffset = kKeysOffset + kNumStages * KTile::kBytes;
CUFLASH_DEVICE int q_slot(int slot) { return kSplitsHeadDim ? slot * QTile::kBytes : 0; }
CUFLASH_DEVICE int k_slot(int slot) { return kKeysOffset + slot * KTile::kBytes; }

// Copies the chunks of a tile's walk, one after the other.
template <class Product>
class ChunkLoader {
 public:
  CUFLASH_DEVICE ChunkLoader(const attention::Params& params, TileState& state)
      : state_(state), blocks_(params, state.visit_range) {}

  // Start to copy the next chunk of K, and of Q where that comes in chunks. Called by all threads.
  CUFLASH_DEVICE void start(int slot) {
    const int head_dim = state_.k.num_columns;
    if (first_column_ == 0) has_block_ = blocks_.next(block_);
    const int last_column = min(first_column_ + kHeadDim, head_dim);
    if (has_block_) {
      Product::load_k(k_slot(slot), state_.k.rows(block_.start, block_.stop).columns(first_column_, last_column));
      if (kSplitsHeadDim) Product::load_q(q_slot(slot), state_.q.columns(first_column_, last_column));
    }
    ptx::cp_async_commit();
    const bool is_last = last_column == head_dim;
    if (threadIdx.x == 0) state_.chunks[slot] = {block_, has_block_, is_last};
    first_column_ = is_last ? 0 : last_column;
  }

 private:
  TileState& state_;
  attention::BlockIterator<kBlockKv, attention::OverKvBlocks, Listed> blocks_;
  attention::KvBlock block_{};
  int first_column_ = 0;
  bool has_block_ = false;
};

// Return log2(2^x + 2^y).
CUFLASH_DEVICE float add_logarithms(float x, float y) {
  const float greater = fmaxf(x, y), less = fminf(x, y);
  if (less == ptx::negative_infinity<float>()) return greater;
  return greater + ptx::log2_accurate(1 + ptx::exp2_approx(less - greater));
}

// Sums of weights of each query of a tile over each block of keys, as logarithms in base 2: [num_kv_blocks, kBlockQ].
struct RowMasses {
  float* data;

  CUFLASH_DEVICE float& at(int kv_block, int row) const { return data[static_cast<int64_t>(kv_block) * kBlockQ + row]; }

  // Called by all threads.
  CUFLASH_DEVICE void clear(int num_kv_blocks) const {
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(num_kv_blocks) * kBlockQ; i += kThreads)
      data[i] = ptx::negative_infinity<float>();
  }

  // Add the weights of a step to the sum of a row over a block of keys. The weights have the sum `sum` times 2^offset.
  // `is_whole`: the step has all keys of the block.
  CUFLASH_DEVICE void add(int kv_block, int row, float offset, float sum, bool is_whole) const {
    float& to = at(kv_block, row);
    const float log_sum = offset + ptx::log2_accurate(sum);
    to = is_whole ? log_sum : add_logarithms(to, log_sum);
  }
};

// Return the thread's columns of a step from `column` on, a bit for each.
CUFLASH_DEVICE uint32_t columns_from(int column) {
  static_assert(Scores::kColumns <= 32 && Scores::column(2) == 8, "a bit for each column, two of eight");
  const int own = column - Scores::first_column();
  return ptx::bits_at_or_above((own >> 3) * 2 + min(own & 7, 2));
}

// Add the weights of a step to the sums of their rows; the weights are overwritten. `offset` of a row is the base-2
// logarithm of the factor by which its weights were divided.
CUFLASH_DEVICE void add_step(Scores& p, const RowMasses& row_masses, const float (&offset)[Scores::kRows],
                             const attention::KvBlock& block, const attention::MassGrid& grid) {
  const attention::BlockCuts cuts{block.start, block.stop, static_cast<int>(grid.block_kv)};
  const int count = cuts.count();
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const int start = cuts.start(n), stop = cuts.stop(n);
    // The thread's columns that are in the block, a bit for each; weights past the step's last key are 0.
    const uint32_t columns = columns_from(start) & ~(n + 1 == count ? 0 : columns_from(stop));
    float sum[Scores::kRows] = {};
#pragma unroll
    for (int j = 0; j < Scores::kColumns; ++j) {
      if (!(columns >> j & 1)) continue;
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) sum[i] += p.at(i, j);
    }
    const bool is_whole = stop - start == cuts.block;
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      sum[i] = tile::quad_sum(sum[i]);
      if (p.first_column() != 0) continue;
      row_masses.add(cuts.first_block() + n, p.first_row() + p.row(i), offset[i], sum[i], is_whole);
    }
  }
}

// Sum over the queries of each block. Called by all threads, between barriers.
CUFLASH_DEVICE void add_masses(const attention::Params& params, const attention::MassGrid& grid,
                               const RowMasses& row_masses, const TileState& state) {
  const attention::WorkTile& work = state.work;
  const attention::BlockCuts queries{work.first, work.last, static_cast<int>(grid.block_q)};
  const auto mass = attention::matrix<float>(grid.mass, work.batch_head, work.batch_head.head, 0, 0);
  const int num_kv_blocks = grid.num_kv_blocks(params.shape), num_blocks = queries.count();
  const int number = threadIdx.x % 32;  // lane in the warp
  for (int kv_block = threadIdx.x / 32; kv_block < num_kv_blocks; kv_block += kNumWarps)
    for (int n = 0; n < num_blocks; ++n) {
      float sum = 0;
      for (int row = queries.start(n) + number; row < queries.stop(n); row += 32)
        sum += ptx::exp2_approx(row_masses.at(kv_block, row) - state.row_shift[row]);
      sum = tile::warp_sum(sum);
      if (number == 0) mass.at(queries.first_block() + n, kv_block) += sum;
    }
}

struct NoOutput {
  CUFLASH_DEVICE void scale_row(int, float) const {}
};

// Store lse of a tile's queries for `add_masses`, and write it to global memory if it was not an input.
CUFLASH_DEVICE void save_shifts(const attention::Params& params, const attention::MassGrid& grid,
                                const Softmax& softmax, float scale_log2, TileState& state) {
  const attention::WorkTile& work = state.work;
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
    state.row_shift[row] = has_key ? row_lse[i] * static_cast<float>(attention::kLog2E) : -ptx::negative_infinity<float>();
  }
}

// Store a tile and its matrices. Called by one thread.
CUFLASH_DEVICE void save_tile(const attention::Params& params, const attention::WorkTile& work, TileState& state) {
  using namespace attention;
  const Shape& shape = params.shape;
  const BatchHead& batch_head = work.batch_head;
  state.work = work;
  state.visit_range = visit_range_of_queries(params, work);
  state.q = matrix<Element>(params.q, batch_head, batch_head.head, shape.seqlen_q, shape.head_dim)
      .rows(work.first, work.last);
  state.k = matrix<Element>(params.k, batch_head, divmod(batch_head.head, shape.group_size).quotient, shape.seqlen_kv,
                            shape.head_dim);
}

// Compute the sums of the tile of queries in `state`.
template <class Product, class Score>
CUFLASH_DEVICE void add_tile(const attention::Params& params, const attention::MassGrid& grid,
                             const RowMasses& row_masses, TileState& state, const Score& score) {
  using namespace attention;
  const Shape& shape = params.shape;
  const float scale_log2 = Softmax::scale_log2(exponent_scale(shape));
  ChunkLoader<Product> loader(params, state);
  if (!kSplitsHeadDim) Product::load_q(q_slot(0), state.q);
#pragma unroll
  for (int slot = 0; slot + 1 < kNumStages; ++slot) loader.start(slot);
  row_masses.clear(grid.num_kv_blocks(shape));
  Softmax softmax;
  Scores s;
  s.fill(0);
#pragma unroll 1
  for (int slot = 0;; slot = slot + 1 == kNumStages ? 0 : slot + 1) {
    ptx::cp_async_wait<kNumStages - 2>();
    Product::make_visible();
    __syncthreads();  // the chunk has arrived, the one before it is read, and the sums of rows are cleared
    const Chunk& chunk = state.chunks[slot];
    if (!chunk.has_block) break;
    loader.start(slot == 0 ? kNumStages - 1 : slot - 1);
    Product::add(s, q_slot(slot), k_slot(slot));
    if (!chunk.is_last_of_block) continue;
    const KvBlock block = chunk.block;
    if constexpr (kHasScore) score_of_queries(s, score, params, state.work, block, 1);
    else if (Softmax::needs_negation(shape.softmax_scale)) Softmax::negate(s, shape.softmax_scale);
    if (!is_unmasked<kBlockKv>(block))
      mask_scores<config::kIsListed>(s, params, state.work, block, ptx::negative_infinity<float>());
    float offset[Scores::kRows];
    softmax.update_max(s, scale_log2, offset);
    if (softmax.max_reasons & Softmax::kLargeMax) softmax.subtract_max(s);
    softmax.exp_scores(s, scale_log2);
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) offset[i] = softmax.row_max[i] * scale_log2;
    add_step(s, row_masses, offset, block, grid);
    s.fill(0);
  }
  ptx::cp_async_wait<0>();
  save_shifts(params, grid, softmax, scale_log2, state);
  __syncthreads();  // lse and the sums of rows are stored
  add_masses(params, grid, row_masses, state);
}

// Compute the sums of all tiles that a thread block owns.
template <class Product, class Score>
CUFLASH_DEVICE void add_all_tiles(const attention::Params& params, const attention::MassGrid& grid, const Score& score) {
  using namespace attention;
  auto& state = *reinterpret_cast<TileState*>(ptx::dynamic_shared<unsigned char>() + kStateOffset);
  const int height = mass_queries(grid, kBlockQ), num_rows = num_query_rows(params, height);
  const int64_t room = static_cast<int64_t>(grid.num_kv_blocks(params.shape)) * kBlockQ;
  const RowMasses row_masses{grid.row_masses + thread_block() * room};
  // Rounds alternate in direction, since the longest tiles come first.
  for (int round = 0; round * num_thread_blocks() < num_rows; ++round) {
    const int rank = round % 2 == 0 ? thread_block() : num_thread_blocks() - 1 - thread_block();
    const int number = round * num_thread_blocks() + rank;
    if (number >= num_rows) continue;
    const WorkTile owned = query_rows_at(params, height, number);
    WorkTile work = owned;
    for (; work.first < owned.last; work.first = work.last) {
      work.last = min(query_tile_end<Listed>(params, work.first, kBlockQ), owned.last);
      __syncthreads();  // all threads have read the state of the tile before
      if (threadIdx.x == 0) save_tile(params, work, state);
      __syncthreads();  // the state is stored
      add_tile<Product>(params, grid, row_masses, state, score);
    }
  }
}

}  // namespace cuflash
