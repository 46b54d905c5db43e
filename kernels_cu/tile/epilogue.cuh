#pragma once
#include <ptx/store.cuh>
#include <tile/copy_async.cuh>
#include <tile/warp_tile.cuh>

// Stores of a warp's part of a product to global memory, rounded to 16 bits.
namespace cuflash::tile {

// Transpose 4 x 4 elements among four threads: thread t holds column t before, and row t afterwards.
CUFLASH_DEVICE void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int lane_offset = 1; lane_offset < 4; lane_offset *= 2) {
    const bool is_upper = ptx::lane() & lane_offset;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & lane_offset) continue;
      uint32_t& first = words[low];
      uint32_t& second = words[low + lane_offset];
      const uint32_t other = __shfl_xor_sync(0xffffffffu, is_upper ? first : second, lane_offset);
      (is_upper ? first : second) = other;
    }
  }
}

// Round a warp's part to T and store it to global memory, within the bounds of a matrix or of stacked rows. Called by
// whole warps.
template <class T, template <class> class RowsOf, class Tile>
CUFLASH_DEVICE void store(RowsOf<T> to, const Tile& from) {
  constexpr int kChunks = Tile::kColumnTiles / 4;  // number of 16-byte chunks per row that a thread stores
  static_assert(sizeof(T) == 2 && Tile::kColumnTiles % 4 == 0, "four threads store 8 columns each");
  Bits128 chunks[Tile::kRows][kChunks];
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* const pair = &from.tiles[i / 2][4 * j + e][i % 2 * 2];
        words[e] = ptx::pack2(T{}, pair[0], pair[1]);
      }
      transpose_in_quad(words);
      chunks[i][j] = {words[0] | static_cast<uint64_t>(words[1]) << 32,
                      words[2] | static_cast<uint64_t>(words[3]) << 32};
    }
  const int first_column = from.warp_column() + ptx::lane() % 4 * 8;
  const int num_columns = first_of(to).num_columns;
  const bool has_full_rows = has_aligned_chunks(to) && from.warp_column() + 8 * Tile::kColumnTiles <= num_columns;
  if (has_full_rows) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int row = from.first_row() + from.row(i);
      if (row >= to.num_rows) continue;
      Bits128* const data = reinterpret_cast<Bits128*>(to.row(row) + first_column);
#pragma unroll
      for (int j = 0; j < kChunks; ++j) data[4 * j] = chunks[i][j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int row = from.first_row() + from.row(i), column = first_column + 32 * j;
      if (row >= to.num_rows) continue;
      uint64_t(&words)[2] = chunks[i][j].at;
#pragma unroll 1  // executed rarely, so the code is kept short
      for (int x = column; x < min(column + kChunkOf<T>, num_columns); ++x) {
        to.at(row, x) = {static_cast<unsigned short>(words[0])};
        words[0] = words[0] >> 16 | words[1] << 48;
        words[1] >>= 16;
      }
    }
}

// Scale four groups of eight columns of a warp's part, from group `first` on, round them to T, and store them to global
// memory. Rows of the matrix must be whole 16-byte chunks, and as long as the tile's. Called by whole warps.
template <class T, class Tile>
CUFLASH_DEVICE void store_full_rows(Matrix<T> to, const Tile& from, int first, float scale) {
  const int column = from.warp_column() + 8 * first + ptx::lane() % 4 * 8;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* const pair = &from.tiles[i / 2][first + e][i % 2 * 2];
      words[e] = ptx::pack2(T{}, pair[0] * scale, pair[1] * scale);
    }
    transpose_in_quad(words);
    const int row = from.first_row() + from.row(i);
    if (row < to.num_rows)
      ptx::store_aligned(reinterpret_cast<Bits128*>(to.data + row * to.row_stride + column),
                         {words[0] | static_cast<uint64_t>(words[1]) << 32,
                          words[2] | static_cast<uint64_t>(words[3]) << 32});
  }
}

}  // namespace cuflash::tile
