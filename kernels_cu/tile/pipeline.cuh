#pragma once
#include <ptx/barrier.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/thread.cuh>
#include <ptx/warpgroup.cuh>
#include <tile/epilogue.cuh>
#include <tile/tensor_map_param.cuh>
#include <tile/wgmma_tile.cuh>

// Pipeline slots in shared memory: tiles that producer warps load and consumer warps multiply.
namespace cuflash::tile {

// A slot is full once all of its data has arrived, and empty once all warps that read it have arrived at its barrier.
struct PipelineSlot {
  uint64_t full, empty;
};

// Number of lanes of a warp that arrive at a barrier. Usually one lane arrives for its warp. In kernels with a
// watchdog, each lane does: NVIDIA's racecheck runs on these kernels, and does not track an order from one lane through
// __syncwarp to another lane.
constexpr int kArrivalsPerWarp = Config::kHasWatchdog ? 32 : 1;

// Return the thread's index in its warp.
CUFLASH_DEVICE int lane() { return ptx::lane(); }

// Wait until the slot is full.
CUFLASH_DEVICE void wait_full(const PipelineSlot& slot, int phase) {
  ptx::mbarrier_wait(ptx::shared_address(&slot.full), phase);
}
// Return whether the slot is full, without waiting.
CUFLASH_DEVICE bool try_wait_full(const PipelineSlot& slot, int phase) {
  return ptx::mbarrier_try_wait(ptx::shared_address(&slot.full), phase);
}
// Wait until the slot may be filled in a phase of this parity; return at once before the first fill.
CUFLASH_DEVICE void wait_empty(const PipelineSlot& slot, int phase) {
  ptx::mbarrier_wait(ptx::shared_address(&slot.empty), phase ^ 1);
}
// Arrive at a barrier. Called by whole warps.
CUFLASH_DEVICE void arrive(const uint64_t& barrier) {
  __syncwarp();
  if (ptx::lane() < kArrivalsPerWarp) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
}

// Transpose a matrix of bits: lane t of 32 holds row t before, and column t afterwards.
CUFLASH_DEVICE uint32_t transpose_bits_in_warp(uint32_t bits) {
  uint32_t low = 0xffff;  // the columns whose index has bit `lane_offset` clear
#pragma unroll
  for (int lane_offset = 16; lane_offset > 0; lane_offset /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, bits, lane_offset);
    bits = ptx::lane() & lane_offset ? bits & ~low | (other & ~low) >> lane_offset
                                     : bits & low | (other & low) << lane_offset;
    low ^= low << lane_offset / 2;
  }
  return bits;
}

// Layout of a tile in a slot: boxes side by side, each of which TMA copies with one instruction.
struct TmaBoxes {
  int start;  // offset from the start of shared memory, in bytes
  int rows, columns;  // size of the tile
  int width;  // number of columns of a box

  CUFLASH_DEVICE TmaBoxes(int start, int rows, int columns, int width)
      : start(start), rows(rows), columns(columns), width(width) {}
  template <class Tile>
  explicit CUFLASH_DEVICE TmaBoxes(Tile tile)
      : start(tile.start), rows(tile.kRows), columns(tile.kColumns), width(tile.kPanelWidth) {}

  // Return the offset of a 16-byte chunk in shared memory, in bytes, with the swizzle of SwizzledTile.
  CUFLASH_DEVICE int at(int row, int chunk, int chunks_per_panel) const {
    const int swizzled = chunk % chunks_per_panel ^ row * chunks_per_panel / kChunkOf<uint16_t> % chunks_per_panel;
    return start + (chunk / chunks_per_panel * rows * chunks_per_panel + row * chunks_per_panel + swizzled) * 16;
  }
};

// Coordinates of a matrix in the tensor map of a stack of matrices: along the axes before its rows, the last axis
// first.
struct TmaCoords {
  int x, y, z;
};

// Start TMA copies to the slot, one panel per copy: rows from `first` on, and columns from `first_column` on. The
// barrier must expect their bytes. Called by one thread.
template <class T = ptx::Half>
CUFLASH_DEVICE void start_tma_boxes(const TmaBoxes& to, const TensorMapParam& from, TmaCoords matrix, int first,
                                    uint32_t barrier, int first_column = 0) {
  constexpr int kBytes = sizeof(T);
  uint32_t panel = ptx::shared_address(ptx::dynamic_shared<unsigned char>()) + to.start;
#pragma unroll
  for (int column = 0; column < to.columns; column += to.width) {
    ptx::tma_load_5d(panel, &from.map, barrier, first_column + column, first, matrix.x, matrix.y, matrix.z);
    panel += kBytes * to.rows * to.width;
  }
}

// Announce the bytes of the copies to the barrier, and start the copies as `start_tma_boxes` does. `extra_bytes` is the
// size of other copies that the caller starts afterwards. Called by one thread.
template <class T = ptx::Half>
CUFLASH_DEVICE void tma_load_boxes(const TmaBoxes& to, const TensorMapParam& from, TmaCoords matrix, int first,
                                   const uint64_t& full, int extra_bytes = 0, int first_column = 0) {
  const uint32_t barrier = ptx::shared_address(&full);
  ptx::mbarrier_arrive_expect_tx(barrier, static_cast<int>(sizeof(T)) * to.rows * to.columns + extra_bytes);
  start_tma_boxes<T>(to, from, matrix, first, barrier, first_column);
}

// Prefetch, by TMA, the rows that `tma_load_boxes` would copy into the L2 cache. Called by one thread.
CUFLASH_DEVICE void tma_prefetch_boxes(const TmaBoxes& to, const TensorMapParam& from, TmaCoords matrix, int first) {
#pragma unroll
  for (int column = 0; column < to.columns; column += to.width)
    ptx::tma_prefetch_5d(&from.map, column, first, matrix.x, matrix.y, matrix.z);
}

// Copy 16 bytes of a row to the slot: `remaining` elements, then zeros. The data have arrived after cp_async_wait_all.
template <class T>
CUFLASH_DEVICE void copy_chunk(int at, const T* data, int remaining, bool is_aligned, int64_t column_stride) {
  if (is_aligned) {
    ptx::cp_async_cg_16(ptx::shared_address(ptx::dynamic_shared<unsigned char>() + at), data, 2 * remaining);
    return;
  }
  Bits128 words{};
#pragma unroll 1
  for (int e = remaining - 1; e >= 0; --e) {
    words.at[1] = words.at[1] << 16 | words.at[0] >> 48;
    words.at[0] = words.at[0] << 16 | data[e * column_stride].bits;
  }
  *reinterpret_cast<Bits128*>(ptx::dynamic_shared<unsigned char>() + at) = words;
}

// Fill the slot from a matrix that TMA cannot copy, by Threads threads, of which `thread` is one. Rows past the matrix
// and rows that are not valid become zeros.
template <int Threads, class T, template <class> class RowsOf, class IsRowValid>
CUFLASH_DEVICE void copy(const TmaBoxes& to, const RowsOf<T>& from, int thread, IsRowValid is_row_valid) {
  const int chunks = to.columns / kChunkOf<T>, chunks_per_panel = to.width / kChunkOf<T>;
  const bool is_aligned = has_aligned_chunks(from);
#pragma unroll 1
  for (int x = thread; x < to.rows * chunks; x += Threads) {
    const int row = x / chunks, chunk = x % chunks;
    const bool in_bounds = row < from.num_rows && is_row_valid(row);
    const int remaining = in_bounds ? min(max(first_of(from).num_columns - chunk * kChunkOf<T>, 0), kChunkOf<T>) : 0;
    const T* const data = remaining > 0 ? &from.at(row, chunk * kChunkOf<T>) : first_of(from).data;
    copy_chunk(to.at(row, chunk, chunks_per_panel), data, remaining, is_aligned, first_of(from).column_stride);
  }
  ptx::cp_async_wait_all();
  ptx::fence_proxy_async();
}

// Fill a row of the slot by one thread; a row that is not valid becomes zeros.
template <class T>
CUFLASH_DEVICE void copy_row(const TmaBoxes& to, int row, const T* data, bool is_valid, int num_columns,
                             bool is_aligned, int64_t column_stride) {
  const int chunks_per_panel = to.width / kChunkOf<T>;
#pragma unroll 1
  for (int chunk = 0; chunk < to.columns / kChunkOf<T>; ++chunk) {
    const int column = chunk * kChunkOf<T>;
    const int remaining = is_valid ? min(max(num_columns - column, 0), kChunkOf<T>) : 0;
    copy_chunk(to.at(row, chunk, chunks_per_panel), remaining > 0 ? data + column * column_stride : data, remaining,
               is_aligned, column_stride);
  }
  ptx::cp_async_wait_all();
  ptx::fence_proxy_async();
}

// Set the rows of the slot from `first` on to 0. Called by a warp.
CUFLASH_DEVICE void clear_rows_from(const TmaBoxes& boxes, int first) {
  const int chunks = boxes.columns / kChunkOf<ptx::Half>, chunks_per_panel = boxes.width / kChunkOf<ptx::Half>;
#pragma unroll 1
  for (int x = first * chunks + ptx::lane(); x < boxes.rows * chunks; x += 32)
    *reinterpret_cast<Bits128*>(ptx::dynamic_shared<unsigned char>() +
                                boxes.at(x / chunks, x % chunks, chunks_per_panel)) = {};
}

// Store the tile to global memory, within the bounds of the matrix, by Threads threads, of which `thread` is one.
template <int Threads, class T>
CUFLASH_DEVICE void copy(const Matrix<T>& to, const TmaBoxes& from, int thread) {
  const int chunks = from.columns / kChunkOf<T>, chunks_per_panel = from.width / kChunkOf<T>;
  const bool is_aligned = has_aligned_chunks(to);
#pragma unroll 1
  for (int x = thread; x < to.num_rows * chunks; x += Threads) {
    const int row = x / chunks, chunk = x % chunks, column = chunk * kChunkOf<T>;
    Bits128 words = *reinterpret_cast<const Bits128*>(ptx::dynamic_shared<unsigned char>() +
                                                      from.at(row, chunk, chunks_per_panel));
    if (is_aligned && column + kChunkOf<T> <= to.num_columns) {
      *reinterpret_cast<Bits128*>(&to.at(row, column)) = words;
      continue;
    }
#pragma unroll 1
    for (int e = 0; e < min(to.num_columns - column, kChunkOf<T>); ++e) {
      to.at(row, column + e) = {static_cast<unsigned short>(words.at[0])};
      words.at[0] = words.at[0] >> 16 | words.at[1] << 48;
      words.at[1] >>= 16;
    }
  }
}

}  // namespace cuflash::tile
