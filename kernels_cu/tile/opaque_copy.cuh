#pragma once
#include <tile/async_copy.cuh>
#include <tile/warp_tile.cuh>

namespace cuflash::tile {

// Thread t of four has element t of each row of 4 x 4; thereafter, of each column.
CUFLASH_DEVICE void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool is_upper = ptx::lane() & step;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & step) continue;
      uint32_t& first = words[low];
      uint32_t& second = words[low + step];
      const uint32_t other = __shfl_xor_sync(0xffffffffu, is_upper ? first : second, step);
      (is_upper ? first : second) = other;
    }
  }
}

// Round a warp's part to T and put it into global memory, as far as the matrix goes. Called by whole warps.
template <class T, class Tile>
CUFLASH_DEVICE void store(Matrix<T> to, const Tile& from) {
  static_assert(sizeof(T) == 2 && Tile::kColumnTiles % 4 == 0, "four threads store 8 columns each");
  const bool is_aligned = to.column_stride == 1 && to.row_stride % kChunkOf<T> == 0 &&
                          reinterpret_cast<uint64_t>(to.data) % sizeof(Packet) == 0;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int row = from.first_row() + from.row(i);
    T* const data = to.data + row * to.row_stride;
#pragma unroll
    for (int j = 0; j < Tile::kColumnTiles; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* const pair = &from.tiles[i / 2][j + e][i % 2 * 2];
        words[e] = ptx::pack2(T{}, pair[0], pair[1]);
      }
      transpose_in_quad(words);
      const int column = from.warp_column() + 8 * (j + ptx::lane() % 4);
      Packet chunk{words[0] | static_cast<uint64_t>(words[1]) << 32, words[2] | static_cast<uint64_t>(words[3]) << 32};
      if (row >= to.num_rows) continue;
      if (is_aligned && column + kChunkOf<T> <= to.num_columns) {
        *reinterpret_cast<Packet*>(data + column) = chunk;
      } else {
#pragma unroll 1  // rare: less text
        for (int x = column; x < min(column + kChunkOf<T>, to.num_columns); ++x) {
          data[x * to.column_stride] = {static_cast<unsigned short>(chunk.at[0])};
          chunk.at[0] = chunk.at[0] >> 16 | chunk.at[1] << 48;
          chunk.at[1] >>= 16;
        }
      }
    }
  }
}

}  // namespace cuflash::tile
