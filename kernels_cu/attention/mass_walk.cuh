#pragma once
#include <attention/mass_sums.cuh>

// The loop of block masses (attention/mass_sums.cuh) in kernels in which all threads copy chunks of q and k and
// multiply them. Rows that are longer than a tile are split into chunks.
namespace cuflash {

// The message next to a chunk of K: the chunk's block of keys, and whether the chunk is the last one of its step. A
// message without a block ends the loop.
struct Chunk {
  attention::KvBlock block;
  bool has_block, is_last_of_block;
};

// State of a thread block in shared memory, which saves registers.
struct TileState {
  MassTile tile;
  Chunk chunks[kNumStages];
  tile::Matrix<Element> q, k;
};

// Q stays in the first slot, unless it is split into chunks like K.
constexpr int kNumQSlots = kSplitsHeadDim ? kNumStages : 1;
constexpr int kKeysOffset = kNumQSlots * QTile::kBytes;
constexpr int kStateOffset = kKeysOffset + kNumStages * KTile::kBytes;
constexpr int kWalkBytes = kStateOffset + static_cast<int>(sizeof(TileState));
CUFLASH_DEVICE QTile q_slot(int slot) { return {kSplitsHeadDim ? slot * QTile::kBytes : 0}; }
CUFLASH_DEVICE KTile k_slot(int slot) { return {kKeysOffset + slot * KTile::kBytes}; }

// The copies of the chunks of a tile, one after the other.
class ChunkLoader {
 public:
  CUFLASH_DEVICE ChunkLoader(const attention::Params& params, const attention::MassGrid& grid, TileState& state)
      : params_(params), grid_(grid), state_(state), blocks_(params, state.tile.visit_range) {}

  // Start copying the next chunk of K, and of Q if Q is split into chunks. Called by all threads.
  CUFLASH_DEVICE void start(int slot) {
    const int head_dim = state_.k.num_columns;
    if (first_column_ == 0) has_block_ = blocks_.next(block_);
    const int last_column = min(first_column_ + kHeadDim, head_dim);
    if (has_block_) {
      tile::load_async<kThreads>(k_slot(slot),
                                 state_.k.rows(block_.start, block_.stop).columns(first_column_, last_column));
      if (kSplitsHeadDim) {
        const int first = grid_.column_of_q(params_.shape, first_column_);
        tile::load_async<kThreads>(q_slot(slot), state_.q.columns(first, min(first + kHeadDim, head_dim)));
      }
    }
    ptx::cp_async_commit();
    const bool is_last = last_column == head_dim;
    if (threadIdx.x == 0) state_.chunks[slot] = {block_, has_block_, is_last};
    first_column_ = is_last ? 0 : last_column;
  }

 private:
  const attention::Params& params_;
  const attention::MassGrid& grid_;
  TileState& state_;
  attention::BlockIterator<kBlockKv, attention::OverKvBlocks, Listed> blocks_;
  attention::KvBlock block_{};
  int first_column_ = 0;
  bool has_block_ = false;
};

// Walk over the keys of the tile in `state`.
template <class Score>
CUFLASH_DEVICE void walk_keys(const attention::Params& params, const attention::MassGrid& grid,
                              const RowMasses& row_masses, TileState& state, const Score& score) {
  using namespace attention;
  const float scale_log2 = Softmax::scale_log2(exponent_scale(params.shape));
  if (threadIdx.x == 0) {
    state.q = queries_of(params, state.tile.work);
    state.k = keys_of(params, state.tile.work);
  }
  __syncthreads();  // the matrices are stored
  ChunkLoader loader(params, grid, state);
  if (!kSplitsHeadDim) tile::load_async<kThreads>(q_slot(0), state.q);
#pragma unroll
  for (int slot = 0; slot + 1 < kNumStages; ++slot) loader.start(slot);
  KeySums sums(row_masses, grid, scale_log2);
  Scores s;
  s.fill(0);
#pragma unroll 1
  for (int slot = 0;; slot = slot + 1 == kNumStages ? 0 : slot + 1) {
    ptx::cp_async_wait<kNumStages - 2>();
    __syncthreads();  // the chunk has arrived, and all threads have read the previous chunk
    const Chunk& chunk = state.chunks[slot];
    if (!chunk.has_block) break;
    loader.start(slot == 0 ? kNumStages - 1 : slot - 1);
    tile::mma_over_k<Element, kHeadDim>(s, tile::left_k_major(q_slot(slot), s.warp_row()),
                                        tile::right_k_major(k_slot(slot), s.warp_column()), false);
    if (!chunk.is_last_of_block) continue;
    const KvBlock block = chunk.block;
    finish_scores(s, score, params, state.tile.work, block);
    sums.open(block);
    sums.add(s, block);
    s.fill(0);
  }
  ptx::cp_async_wait<0>();
  sums.finish();
  save_shifts(params, grid, sums.softmax, scale_log2, state.tile);
}

}  // namespace cuflash
