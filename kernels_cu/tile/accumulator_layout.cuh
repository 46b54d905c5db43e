#pragma once
#include <ptx/atomic.cuh>
#include <ptx/thread.cuh>
#include <tile/warp_tile.cuh>

// Sums in global memory, stored in the layout of the registers that are added to them.
namespace cuflash::tile {

// A block's matrix of sums in global memory, in the order of the accumulator's registers: every Run registers of a
// thread are adjacent, so that each access of a warp fills whole cache lines. Readers must divide the matrix among
// NumWarps warps in the same way as writers.
template <class Tile, int Run, int NumWarps = 0>
struct AccumulatorLayout {
  static_assert(Run == 1 || Run == 4, "one instruction adds to one sum, or to four");
  static constexpr int kFloatsPerWarp = Tile::kRowTiles * Tile::kColumnTiles * 4 * 32;
  template <int Num>
  struct alignas(4 * Num) Sums { float at[Num]; };  // the elements that one instruction moves

  float* data;

  static CUFLASH_DEVICE int warp() { return threadIdx.x / 32 % (NumWarps > 0 ? NumWarps : 32); }
  static CUFLASH_DEVICE int thread_offset() { return warp() * kFloatsPerWarp + Run * ptx::lane(); }
  explicit CUFLASH_DEVICE AccumulatorLayout(float* matrix) : data(matrix + thread_offset()) {}
  CUFLASH_DEVICE float* at(int i, int j, int e) const {
    return data + (i * Tile::kColumnTiles + j) * 128 + e / Run * 32 + e % Run;
  }

  // Add a part to the matrix atomically, starting at the warp's column 8 * `first`.
  template <class Part>
  CUFLASH_DEVICE void atomic_add(const Part& part, int first = 0) const {
#pragma unroll
    for (int i = 0; i < Part::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < Part::kColumnTiles; ++j)
        if (Run == 4) {
          ptx::red_add_4(at(i, first + j, 0), part.tiles[i][j]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) ptx::red_add(at(i, first + j, e), part.tiles[i][j][e]);
        }
  }

  // Store the warp's part to a buffer in shared memory, in which `thread_data` points to the thread's elements.
  static CUFLASH_DEVICE void store_shared(float* thread_data, const Tile& part) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kColumnTiles; ++j) {
        const float(&sums)[4] = part.tiles[i][j];
        reinterpret_cast<Sums<4>*>(thread_data)[(i * Tile::kColumnTiles + j) * 32] = {
            {sums[0], sums[1], sums[2], sums[3]}};
      }
  }

  // Add `num` groups of eight columns, starting at group `first`, from a buffer that `store_shared` filled to a part.
  static CUFLASH_DEVICE void add_shared(const float* thread_data, Tile& part, int first, int num) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
      for (int j = first; j < first + num; ++j) {
        const auto sums = reinterpret_cast<const Sums<4>*>(thread_data)[(i * Tile::kColumnTiles + j) * 32];
#pragma unroll
        for (int e = 0; e < 4; ++e) part.tiles[i][j][e] += sums.at[e];
      }
  }

  // Load the warp's part.
  CUFLASH_DEVICE void load(Tile& part) const {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; e += Run) {
          const auto sums = *reinterpret_cast<const Sums<Run>*>(at(i, j, e));
#pragma unroll
          for (int x = 0; x < Run; ++x) part.tiles[i][j][e + x] = sums.at[x];
        }
  }

  // Store the warp's part without atomics: no other thread block may write to the matrix.
  CUFLASH_DEVICE void store(const Tile& part) const {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; e += Run) {
          Sums<Run> sums;
#pragma unroll
          for (int x = 0; x < Run; ++x) sums.at[x] = part.tiles[i][j][e + x];
          *reinterpret_cast<Sums<Run>*>(at(i, j, e)) = sums;
        }
  }
};

// A matrix of sums in global memory, row after row, to which parts add whose rows lie anywhere in it. Within 16 columns of
// a row, a thread's four registers are adjacent.
template <class Tile, int Run>
struct RowLayout {
  static_assert(Run == 1 || Run == 4, "one instruction adds to one sum, or to four");
  static_assert(Tile::kColumnTiles % 2 == 0, "a thread's four registers of a row are in two groups of eight columns");

  // Call visit(address, registers) for each four adjacent sums of the thread; `address` is null past the last row.
  template <class Rows, class Part, class Visit>
  static CUFLASH_DEVICE void for_each_run(const Rows& rows, Part& part, Visit visit) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int row = part.first_row() + part.row(i);
      float* const data =
          row < rows.num_rows ? rows.row(row) + part.warp_column() + ptx::lane() % 4 * 4 : nullptr;
#pragma unroll
      for (int j = 0; j < Tile::kColumnTiles; j += 2)
        visit(data == nullptr ? nullptr : data + 8 * j, part.tiles[i / 2][j] + i % 2 * 2,
              part.tiles[i / 2][j + 1] + i % 2 * 2);
    }
  }

  // Add a part to its rows atomically.
  template <class Rows>
  static CUFLASH_DEVICE void atomic_add(const Rows& rows, const Tile& part) {
    for_each_run(rows, part, [](float* sums, const float* first, const float* second) {
      if (sums == nullptr) return;
      const float run[4] = {first[0], first[1], second[0], second[1]};
      if (Run == 4) {
        ptx::red_add_4(sums, run);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) ptx::red_add(sums + e, run[e]);
      }
    });
  }

  // Load a part; rows past the last one become 0.
  template <class Rows>
  static CUFLASH_DEVICE void load(const Rows& rows, Tile& part) {
    struct alignas(16) Sums { float at[4]; };
    for_each_run(rows, part, [](const float* data, float* first, float* second) {
      const Sums sums = data == nullptr ? Sums{} : *reinterpret_cast<const Sums*>(data);
      first[0] = sums.at[0], first[1] = sums.at[1], second[0] = sums.at[2], second[1] = sums.at[3];
    });
  }
};

}  // namespace cuflash::tile
