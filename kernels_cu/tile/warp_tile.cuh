#pragma once
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/mma.cuh>
#include <ptx/thread.cuh>
#include <tile/swizzled_tile.cuh>

// Matrices in the registers of warps, in the layout of the tensor cores, and their products.
namespace cuflash::tile {

// A part of a block's matrix in the registers of one warp: RowTiles x ColumnTiles results of mma_m16n8k16. The block's
// warps are arranged in RowGroups rows. A thread holds two of every 16 rows, and two adjacent columns of every 8: the
// thread's row i is row first_row() + row(i) of the block's matrix, and likewise for columns.
template <int RowTiles, int ColumnTiles, int RowGroups, int ColumnGroups = 1>
struct WarpTile {
  static constexpr int kRowTiles = RowTiles;
  static constexpr int kColumnTiles = ColumnTiles;
  static constexpr int kRows = 2 * RowTiles;
  static constexpr int kColumns = 2 * ColumnTiles;

  float tiles[RowTiles][ColumnTiles][4];

  static CUFLASH_DEVICE int warp_row() { return threadIdx.x / 32 % RowGroups * 16 * RowTiles; }
  static CUFLASH_DEVICE int warp_column() { return threadIdx.x / 32 / RowGroups % ColumnGroups * 8 * ColumnTiles; }
  // Warps whose index exceeds the number of parts hold copies of parts of other warps.
  static CUFLASH_DEVICE bool is_first_owner() { return threadIdx.x / 32 < RowGroups * ColumnGroups; }
  static CUFLASH_DEVICE int first_row() { return warp_row() + ptx::lane() / 4; }
  static CUFLASH_DEVICE int first_column() { return warp_column() + ptx::lane() % 4 * 2; }
  static constexpr CUFLASH_DEVICE int row(int i) { return 8 * i; }
  static constexpr CUFLASH_DEVICE int column(int j) { return 8 * (j / 2) + j % 2; }

  CUFLASH_DEVICE float& at(int i, int j) { return tiles[i / 2][j / 2][2 * (i % 2) + j % 2]; }

  CUFLASH_DEVICE void fill(float value) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) at(i, j) = value;
  }

  CUFLASH_DEVICE void scale_row(int i, float factor) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) at(i, j) *= factor;
  }

  CUFLASH_DEVICE void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) scale_row(i, factor);
  }
};

// Return the number of rows in which `num_warps` warps are arranged to share a matrix of `rows` x `columns`. Of the
// numbers that leave each warp whole pairs of fragments, it is the one for which warps read least of the operands; 0 if
// there is no such number.
constexpr CUFLASH_DEVICE int row_groups(int rows, int columns, int num_warps) {
  int best = 0, min_read = rows + columns + 1;
  for (int groups = 1; groups <= num_warps; ++groups) {
    if (num_warps % groups != 0 || rows % (16 * groups) != 0 || columns % (16 * (num_warps / groups)) != 0) continue;
    const int num_read = rows / groups + columns / (num_warps / groups);
    if (num_read <= min_read) {  // on a tie, more groups: fewer rows per warp save registers
      best = groups;
      min_read = num_read;
    }
  }
  return best;
}

// Return how many of `num_warps` warps can divide a matrix among themselves.
constexpr CUFLASH_DEVICE int num_owner_warps(int rows, int columns, int num_warps) {
  while (row_groups(rows, columns, num_warps) == 0) num_warps /= 2;
  return num_warps;
}

// The part of a Rows x Columns matrix that one of NumWarps warps holds.
template <int Rows, int Columns, int NumWarps>
struct WarpPartition {
  static constexpr int kNumOwnerWarps = num_owner_warps(Rows, Columns, NumWarps);
  static constexpr int kRowGroups = row_groups(Rows, Columns, kNumOwnerWarps),
      kColumnGroups = kNumOwnerWarps / kRowGroups;
  using Tile = WarpTile<Rows / kRowGroups / 16, Columns / kColumnGroups / 8, kRowGroups, kColumnGroups>;
};

// Return the sum or, in the second function, the maximum over each `Width` adjacent threads of a warp, to each of them.
// Called by whole warps.
template <int Width>
CUFLASH_DEVICE float lane_sum(float x) {
#pragma unroll
  for (int lane_offset = 1; lane_offset < Width; lane_offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, lane_offset);
  return x;
}
template <int Width>
CUFLASH_DEVICE float lane_max(float x) {
#pragma unroll
  for (int lane_offset = 1; lane_offset < Width; lane_offset *= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane_offset));
  return x;
}
// Return the sum or maximum over a row of a warp's tile, which four adjacent threads share, or the sum over a warp, to
// each thread. Called by whole warps.
CUFLASH_DEVICE float quad_sum(float x) { return lane_sum<4>(x); }
CUFLASH_DEVICE float quad_max(float x) { return lane_max<4>(x); }
CUFLASH_DEVICE float warp_sum(float x) { return lane_sum<32>(x); }

// Fragments of a matrix in shared memory, 16 x 16 elements at a time; each thread has the address of a 16-byte row.
// `KMajorFragments` reads the matrix as it is stored: its rows are the left operand's rows and the right operand's
// columns. `MnMajorFragments` reads it transposed.
template <class Matrix>
struct KMajorFragments {
  static constexpr bool kIsTransposed = false;
  uint32_t start;

  CUFLASH_DEVICE uint32_t at(int tile, int k) const { return Matrix::advanced(start, 16 * tile, 2 * k); }
};
template <class Matrix, int NumTiles>
struct MnMajorFragments {
  static constexpr bool kIsTransposed = true;
  // whether a warp's first chunk is aligned to its tiles
  static constexpr bool kUsesXorOffset = (NumTiles & (NumTiles - 1)) == 0;
  Matrix matrix;
  int row, chunk;

  CUFLASH_DEVICE uint32_t at(int tile, int k) const {
    return kUsesXorOffset ? Matrix::advanced(matrix.address(row, chunk), 16 * k, 2 * tile)
                    : Matrix::advanced(matrix.address(row, chunk + 2 * tile), 16 * k, 0);
  }
};

// Return the fragments of a left or right operand, starting at row or column `first` of the product.
template <class Matrix>
CUFLASH_DEVICE KMajorFragments<Matrix> left_k_major(Matrix matrix, int first) {
  const int lane = ptx::lane();
  return {matrix.address(first + lane % 16, lane / 16)};
}
template <class Matrix>
CUFLASH_DEVICE KMajorFragments<Matrix> right_k_major(Matrix matrix, int first) {
  const int lane = ptx::lane();
  return {matrix.address(first + lane / 16 * 8 + lane % 8, lane / 8 % 2)};
}
template <int NumTiles, class Matrix>
CUFLASH_DEVICE MnMajorFragments<Matrix, NumTiles> left_mn_major(Matrix matrix, int first) {
  const int lane = ptx::lane();
  return {matrix, lane / 16 * 8 + lane % 8, first / Matrix::kChunk + lane / 8 % 2};
}
template <int NumTiles, class Matrix>
CUFLASH_DEVICE MnMajorFragments<Matrix, NumTiles> right_mn_major(Matrix matrix, int first) {
  const int lane = ptx::lane();
  return {matrix, lane % 16, first / Matrix::kChunk + lane / 16};
}

template <class Fragments>
CUFLASH_DEVICE void load(uint32_t (&frag)[4], const Fragments& from, int tile, int k) {
  if (Fragments::kIsTransposed) ptx::ldmatrix_x4_trans(frag, from.at(tile, k));
  else ptx::ldmatrix_x4(frag, from.at(tile, k));
}

// c += a b, or c = a b if `is_first`, over sixteen columns of a and rows of b.
template <class T, class Tile, class Right>
CUFLASH_DEVICE void mma_k_step(Tile& c, const uint32_t (&a_frag)[Tile::kRowTiles][4], const Right& b, int k,
                               bool is_first) {
#pragma unroll
  for (int j = 0; j < Tile::kColumnTiles; j += 2) {
    uint32_t b_frag[4];
    load(b_frag, b, j / 2, k);
    const uint32_t left[2] = {b_frag[0], b_frag[1]}, right[2] = {b_frag[2], b_frag[3]};
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
      if (is_first) {
        ptx::first_mma_m16n8k16(T{}, c.tiles[i][j], a_frag[i], left);
        ptx::first_mma_m16n8k16(T{}, c.tiles[i][j + 1], a_frag[i], right);
      } else {
        ptx::mma_m16n8k16(T{}, c.tiles[i][j], a_frag[i], left);
        ptx::mma_m16n8k16(T{}, c.tiles[i][j + 1], a_frag[i], right);
      }
    }
  }
}

struct NoOp {
  CUFLASH_DEVICE void operator()(int) const {}
};

// c += a b, or c = a b if `is_first`, summed over Depth. `overlapped` is called after every sixteen columns of Depth,
// while the tensor cores are busy.
template <class T, int Depth, class Tile, class Left, class Right, class Overlapped = NoOp>
CUFLASH_DEVICE void mma_over_k(Tile& c, const Left& a, const Right& b, bool is_first, Overlapped overlapped = {}) {
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k) {
    uint32_t a_frag[Tile::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) load(a_frag[i], a, i, k);
    mma_k_step<T>(c, a_frag, b, k, is_first && k == 0);
    overlapped(k);
  }
}

// Products of matrices in shared memory, of which each warp computes its part. Called by whole warps.

// c = a b^T
template <class Tile, class T, int Rows, int Columns, int Depth, class Overlapped = NoOp>
CUFLASH_DEVICE void gemm_nt(Tile& c, SwizzledTile<T, Rows, Depth> a, SwizzledTile<T, Columns, Depth> b,
                            Overlapped overlapped = {}) {
  mma_over_k<T, Depth>(c, left_k_major(a, c.warp_row()), right_k_major(b, c.warp_column()), true, overlapped);
}

// c = a b
template <class Tile, class T, int Rows, int Columns, int Depth>
CUFLASH_DEVICE void gemm_nn(Tile& c, SwizzledTile<T, Rows, Depth> a, SwizzledTile<T, Depth, Columns> b) {
  mma_over_k<T, Depth>(c, left_k_major(a, c.warp_row()),
                       right_mn_major<Tile::kColumnTiles / 2>(b, c.warp_column()), true);
}

// c += a^T b
template <class Tile, class T, int Rows, int Columns, int Depth, class Overlapped = NoOp>
CUFLASH_DEVICE void gemm_add_tn(Tile& c, SwizzledTile<T, Depth, Rows> a, SwizzledTile<T, Depth, Columns> b,
                                Overlapped overlapped = {}) {
  mma_over_k<T, Depth>(c, left_mn_major<Tile::kRowTiles>(a, c.warp_row()),
                       right_mn_major<Tile::kColumnTiles / 2>(b, c.warp_column()), false, overlapped);
}

// c += a b, where a is a product that the same warp computed, rounded to T; its registers already have an operand's
// layout.
template <class Tile, class Left, class T, int Depth, int Columns>
CUFLASH_DEVICE void gemm_add_nn(Tile& c, const Left& a, SwizzledTile<T, Depth, Columns> b) {
  static_assert(8 * Left::kColumnTiles == Depth && 8 * Tile::kColumnTiles == Columns, "a warp holds whole rows");
  const auto b_frags = right_mn_major<1>(b, 0);
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k) {
    uint32_t a_frag[Tile::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float(&from)[4] = a.tiles[i][2 * k + e / 2];
        a_frag[i][e] = ptx::pack2(T{}, from[e % 2 * 2], from[e % 2 * 2 + 1]);
      }
    mma_k_step<T>(c, a_frag, b_frags, k, false);
  }
}

// Two adjacent columns of a row.
struct alignas(8) Float2 {
  float at[2];
};

// Store row i of a thread's part to global memory, where the row starts at a multiple of 8 bytes.
template <class Tile>
CUFLASH_DEVICE void store_row(float* to, const Tile& from, int i) {
#pragma unroll
  for (int j = 0; j < Tile::kColumnTiles; ++j) {
    const float* const pair = &from.tiles[i / 2][j][i % 2 * 2];
    *reinterpret_cast<Float2*>(to + from.first_column() + 8 * j) = {pair[0], pair[1]};
  }
}

// Round eight columns of a warp's part to T and store them to shared memory. Called by whole warps; if several warps
// hold the same part, the first one stores it.
template <class Tile, class T, int Rows, int Columns>
CUFLASH_DEVICE void store_columns(SwizzledTile<T, Rows, Columns> to, const Tile& from, int column_tile) {
  constexpr int kChunk = kChunkOf<T>;
  const int row = from.first_row(), chunk = from.warp_column() / kChunk;
  const int pair_of_lane = from.first_column() % kChunk / 2;
  const int start = to.offset(row, chunk + column_tile);
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const float* const pair = &from.tiles[i / 2][column_tile][i % 2 * 2];
    to.template pointer<uint32_t>(to.advanced(start, from.row(i), 0))[pair_of_lane] = ptx::pack2(T{}, pair[0], pair[1]);
  }
}

// Round all columns of a warp's part to T and store them to shared memory, as `store_columns` does.
template <class Tile, class T, int Rows, int Columns>
CUFLASH_DEVICE void store(SwizzledTile<T, Rows, Columns> to, const Tile& from) {
#pragma unroll
  for (int j = 0; j < Tile::kColumnTiles; ++j) store_columns(to, from, j);
}

}  // namespace cuflash::tile
