#pragma once
#include <tile/warp_tile.cuh>

// Products of floats on the tensor cores, which multiply tf32 numbers: floats with 11 significant bits. Operands are
// rounded to tf32. If kTf32Products is 3, each operand is split into two tf32 numbers instead, hi + lo, and three of
// the four products are summed: a split loses at most 2^-23 of an operand, and the omitted lo lo is at most 2^-22 of a
// product.
namespace cuflash::tile {

constexpr int kTf32Products = Config::kTf32Products;

// N numbers, each split into two tf32 numbers, or rounded to tf32 in `hi`.
template <int N>
struct Tf32 {
  uint32_t hi[N], lo[N];  // the instruction ignores the bits of lo beyond tf32

  explicit CUFLASH_DEVICE Tf32(const uint32_t (&x)[N]) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      if (kTf32Products == 1) {
        hi[e] = ptx::to_tf32(__uint_as_float(x[e]));
      } else {  // rounds as to_tf32 does, but lo keeps a NaN that hi may lose
        hi[e] = (x[e] + 0x1000u) & 0xffffe000u;
        lo[e] = __float_as_uint(__uint_as_float(x[e]) - __uint_as_float(hi[e]));
      }
    }
  }
};

// d += a b, adding the smallest products first.
CUFLASH_DEVICE void multiply_add(float (&d)[4], const Tf32<4>& a, const Tf32<2>& b) {
  if (kTf32Products == 3) {
    ptx::mma_m16n8k8_tf32(d, a.lo, b.hi);
    ptx::mma_m16n8k8_tf32(d, a.hi, b.lo);
  }
  ptx::mma_m16n8k8_tf32(d, a.hi, b.hi);
}

// Fragments of a matrix that is read across its rows, word by word, since ldmatrix transposes only 16-bit elements. A
// thread reads two of every eight rows: t and t + 4, or the adjacent rows 2 t and 2 t + 1, with t = lane % 4.
template <class Matrix, int NumTiles, bool IsLeft, bool Adjacent>
struct TransposedWords {
  static constexpr bool kUsesXorOffset = (NumTiles & (NumTiles - 1)) == 0;  // see MnMajorFragments

  Matrix matrix;
  int chunk;

  CUFLASH_DEVICE uint32_t at(int tile, int k, int which_row, int which_column) const {
    const int row = ptx::lane() % 4 * (Adjacent ? 2 : 1), rows = 8 * k + which_row * (Adjacent ? 1 : 4);
    const int chunks = 4 * tile + 2 * which_column;
    const int start = matrix.offset(row, chunk + (kUsesXorOffset ? 0 : chunks)) + ptx::lane() / 4 % 4 * 4;
    return *matrix.template pointer<uint32_t>(Matrix::advanced(start, rows, kUsesXorOffset ? chunks : 0));
  }
};

// Return the fragments of a matrix, starting at row or column `first` of the product.
template <bool Adjacent = false, int NumTiles, bool IsLeft, class Matrix>
CUFLASH_DEVICE TransposedWords<Matrix, NumTiles, IsLeft, Adjacent> transposed_words(Matrix matrix, int first) {
  return {matrix, first / kChunkOf<float> + ptx::lane() / 16};
}

template <class Matrix, int Tiles, bool IsLeft, bool Adjacent>
CUFLASH_DEVICE void load(uint32_t (&frag)[4], const TransposedWords<Matrix, Tiles, IsLeft, Adjacent>& from, int tile,
                         int k) {
#pragma unroll
  for (int e = 0; e < 4; ++e) frag[e] = from.at(tile, k, IsLeft ? e / 2 : e % 2, IsLeft ? e % 2 : e / 2);
}

// A product that the same warp computed, as a left operand: its adjacent columns are those that the operand needs.
template <class Tile>
struct FragmentSource {
  const Tile& tile;
};

template <class Tile>
CUFLASH_DEVICE void load(uint32_t (&frag)[4], const FragmentSource<Tile>& from, int tile, int k) {
#pragma unroll
  for (int e = 0; e < 4; ++e) frag[e] = __float_as_uint(from.tile.tiles[tile][k][e % 2 * 2 + e / 2]);
}

// Return for how many column tiles three products are summed at once. Tensor cores round sums towards zero. Therefore
// the three products are summed from zero each time, and then added to c with rounding to nearest, for as many column
// tiles as registers allow.
constexpr CUFLASH_DEVICE int tiles_per_pass(int row_tiles, int column_tiles) {
  const int registers = row_tiles * column_tiles > 16 ? 16 : 32;
  int most = column_tiles;
  while (most % 4 == 0 && 4 * row_tiles * most > registers) most /= 2;
  return most;
}

// Number of unrolled steps of a loop. More steps would load fragments early, into registers that accumulators need.
template <class Tile, int Depth>
constexpr int kStepUnroll = Tile::kRowTiles * Tile::kColumnTiles <= 8 ? 4 : Depth <= 16 ? 1 : 2;

// c = a b, or c += a b if `Accumulates`, summed over Depth in steps of eight.
template <bool Accumulates, int Depth, int Unroll, class Tile, class Left, class Right>
CUFLASH_DEVICE void multiply_tf32(Tile& c, const Left& a, const Right& b) {
  constexpr int kUnroll = Unroll;
  constexpr bool kSumsApart = Accumulates && kTf32Products == 3;
  constexpr int kTiles = kSumsApart ? tiles_per_pass(Tile::kRowTiles, Tile::kColumnTiles) : Tile::kColumnTiles;
#pragma unroll
  for (int first = 0; first < Tile::kColumnTiles; first += kTiles) {
    float sums[Tile::kRowTiles][kTiles][4];
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = Accumulates && !kSumsApart ? c.tiles[i][first + j][e] : 0;
#pragma unroll kUnroll
    for (int k = 0; k < Depth / 8; ++k) {
      uint32_t a_frag[Tile::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < Tile::kRowTiles; ++i) load(a_frag[i], a, i, k);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b_frag[4];
        load(b_frag, b, (first + j) / 2, k);
        const Tf32<2> left({b_frag[0], b_frag[1]}), right({b_frag[2], b_frag[3]});
#pragma unroll
        for (int i = 0; i < Tile::kRowTiles; ++i) {
          const Tf32<4> a_split(a_frag[i]);
          multiply_add(sums[i][j], a_split, left);
          multiply_add(sums[i][j + 1], a_split, right);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& sum = c.tiles[i][first + j][e];
          sum = kSumsApart ? sum + sums[i][j][e] : sums[i][j][e];
        }
  }
}

// Products with the interface of those in tile/warp_tile.cuh. Called by whole warps.

// c = a b^T
template <class Tile, int Rows, int Columns, int Depth>
CUFLASH_DEVICE void gemm_nt(Tile& c, SwizzledTile<float, Rows, Depth> a, SwizzledTile<float, Columns, Depth> b) {
  multiply_tf32<false, Depth, kStepUnroll<Tile, Depth>>(c, left_k_major(a, c.warp_row()),
                                                        right_k_major(b, c.warp_column()));
}

// c = a b
template <class Tile, int Rows, int Columns, int Depth>
CUFLASH_DEVICE void gemm_nn(Tile& c, SwizzledTile<float, Rows, Depth> a, SwizzledTile<float, Depth, Columns> b) {
  const auto right = transposed_words<false, Tile::kColumnTiles / 2, false>(b, c.warp_column());
  multiply_tf32<false, Depth, kStepUnroll<Tile, Depth>>(c, left_k_major(a, c.warp_row()), right);
}

// c += a^T b
template <class Tile, int Rows, int Columns, int Depth>
CUFLASH_DEVICE void gemm_add_tn(Tile& c, SwizzledTile<float, Depth, Rows> a, SwizzledTile<float, Depth, Columns> b) {
  const auto left = transposed_words<false, Tile::kRowTiles, true>(a, c.warp_row());
  const auto right = transposed_words<false, Tile::kColumnTiles / 2, false>(b, c.warp_column());
  multiply_tf32<true, Depth, kStepUnroll<Tile, Depth>>(c, left, right);
}

// c += a b, where a is a product that the same warp computed.
template <class Tile, class Left, int Depth, int Columns>
CUFLASH_DEVICE void gemm_add_nn(Tile& c, const Left& a, SwizzledTile<float, Depth, Columns> b) {
  static_assert(8 * Left::kColumnTiles == Depth && 8 * Tile::kColumnTiles == Columns, "a warp holds whole rows");
  multiply_tf32<true, Depth, Depth / 8>(c, FragmentSource<Left>{a}, transposed_words<true, 1, false>(b, 0));
}

// Store a warp's part to shared memory. Called by whole warps; if several warps hold the same part, the first one
// stores it.
template <class Tile, int Rows, int Columns>
CUFLASH_DEVICE void store(SwizzledTile<float, Rows, Columns> to, const Tile& from) {
  const int row = from.first_row(), chunk = from.first_column() / kChunkOf<float>;
#pragma unroll
  for (int j = 0; j < Tile::kColumnTiles; ++j) {
    const int start = to.offset(row, chunk + 2 * j) + from.first_column() % kChunkOf<float> * 4;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      auto& pair = *to.template pointer<Float2>(to.advanced(start, from.row(i), 0));
      pair = {from.tiles[i / 2][j][i % 2 * 2], from.tiles[i / 2][j][i % 2 * 2 + 1]};
    }
  }
}

}  // namespace cuflash::tile
