#pragma once
#include <ptx/packed.cuh>
#include <tile/shared_tile.cuh>
#include <tile/warp_tile.cuh>

// FP8 (e4m3) numbers in tiles that the tensor cores multiply as 16-bit numbers. Both 16-bit formats represent every FP8
// number exactly.
namespace cuflash::tile {

// Round a number to e4m3: to nearest, ties to even, with a magnitude of at most 448. NaN is not supported.
CUFLASH_DEVICE ptx::Float8E4M3 to_e4m3(float x) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  // A float has 20 more mantissa bits than an e4m3 number, and its exponent is larger by 120. Adding half of the last
  // retained place, less one if that place is even, and then truncating rounds to nearest.
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  // Below 2^-6 the last place of e4m3 is 2^-9. Floats from 2^14 on have the same last place, so adding 2^14 rounds
  // correctly.
  const uint32_t subnormal = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - __float_as_uint(16384.0f);
  return {static_cast<unsigned char>((magnitude < 0x3c800000u ? subnormal : normal) | (bits >> 24 & 0x80u))};
}

// Four FP8 numbers widened to 16 bits: `even` has the first and third, `odd` the second and fourth.
struct Widened {
  uint32_t even, odd;
};
// Widen four numbers. Their bits are moved to the positions of the wider format, which divides the numbers by a power
// of two; a multiplication reverses this. A NaN becomes 480.
CUFLASH_DEVICE Widened widened(ptx::Half, uint32_t x) {
  constexpr uint32_t kBits = 0x3f803f80u, kSigns = 0x80008000u, kFactors = 0x5c005c00u;  // 2^8 in each half
  return {ptx::multiply2(ptx::Half{}, (x << 7 & kBits) | (x << 8 & kSigns), kFactors),
          ptx::multiply2(ptx::Half{}, (x >> 1 & kBits) | (x & kSigns), kFactors)};
}
CUFLASH_DEVICE Widened widened(ptx::BFloat16, uint32_t x) {
  constexpr uint32_t kBits = 0x07f007f0u, kSigns = 0x80008000u, kFactors = 0x7b807b80u;  // 2^120 in each half
  return {ptx::multiply2(ptx::BFloat16{}, (x << 4 & kBits) | (x << 8 & kSigns), kFactors),
          ptx::multiply2(ptx::BFloat16{}, (x >> 4 & kBits) | (x & kSigns), kFactors)};
}

// A matrix of 8-bit numbers in shared memory.
template <int Rows, int Columns>
using E4M3Tile = SwizzledTile<ptx::Float8E4M3, Rows, Columns>;

// Load a fragment of 16 columns of a left operand, in the column order of `widened`: columns 4t, 4t + 2 and 4t + 1, 4t
// + 3 replace 2t, 2t + 1 and 2t + 8, 2t + 9.
template <class T, int Rows, int Columns>
CUFLASH_DEVICE void load_interleaved(uint32_t (&frag)[4], SwizzledTile<T, Rows, Columns> a, int first_row, int k) {
  struct alignas(8) Pairs {
    uint32_t at[2];
  };
  const int lane = ptx::lane(), row = first_row + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Pairs x = a.template pointer<Pairs>(a.offset(row + 8 * half, 2 * k + lane % 4 / 2))[lane % 2];
    frag[half] = (x.at[0] & 0xffffu) | x.at[1] << 16;
    frag[2 + half] = x.at[0] >> 16 | (x.at[1] & 0xffff0000u);
  }
}

// Sixteen rows of a left operand, with their columns in the order of `load_interleaved`. The rows stay in registers
// from product to product if `IsKept`; otherwise they are loaded for each product.
template <bool IsKept, class T, int Rows, int Columns>
class InterleavedRows {
 public:
  using From = SwizzledTile<T, Rows, Columns>;

  CUFLASH_DEVICE InterleavedRows(From from, int first_row) : from_(from), first_row_(first_row) {
    if constexpr (IsKept) {
#pragma unroll
      for (int k = 0; k < Columns / 16; ++k) load_interleaved(kept_[k], from, first_row, k);
    }
  }
  CUFLASH_DEVICE void get(uint32_t (&frag)[4], int k) const {
    if constexpr (IsKept) {
#pragma unroll
      for (int e = 0; e < 4; ++e) frag[e] = kept_[k][e];
    } else {
      load_interleaved(frag, from_, first_row_, k);
    }
  }

 private:
  From from_;
  int first_row_;
  uint32_t kept_[IsKept ? Columns / 16 : 1][4];
};

// c = a b^T, where b is FP8. Called by whole warps.
template <class Tile, bool IsKept, class T, int Rows, int Columns, int Depth>
CUFLASH_DEVICE void gemm_nt(Tile& c, const InterleavedRows<IsKept, T, Rows, Depth>& a, E4M3Tile<Columns, Depth> b) {
  static_assert(Tile::kRowTiles == 1 && Depth % 32 == 0, "a warp has 16 rows, and two chunks of b are 32 columns");
  const auto b_frags = right_k_major(b, c.warp_column());
  c.fill(0);
#pragma unroll
  for (int k = 0; k < Depth / 32; ++k) {
    uint32_t a_frag[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) a.get(a_frag[half], 2 * k + half);
#pragma unroll
    for (int j = 0; j < Tile::kColumnTiles; j += 2) {
      uint32_t bytes[4];  // from column 32 k on: two chunks of eight rows, then two of the next eight
      ptx::ldmatrix_x4(bytes, b_frags.at(j / 2, k));
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const Widened x = widened(T{}, bytes[part]);
        const uint32_t b_frag[2] = {x.even, x.odd};
        ptx::mma_m16n8k16(T{}, c.tiles[0][j + part / 2], a_frag[part % 2], b_frag);
      }
    }
  }
}

// c += a b, where b is FP8, and a is a product that the same warp computed, rounded to bfloat16. Of each sixteen
// columns of c, the even ones are one tile and the odd ones the next tile; `interleaved_column` returns the column.
template <class Tile, class Left, int Depth, int Columns>
CUFLASH_DEVICE void gemm_add_nn(Tile& c, const Left& a, E4M3Tile<Depth, Columns> b) {
  static_assert(8 * Left::kColumnTiles == Depth && 8 * Tile::kColumnTiles == Columns && Tile::kRowTiles == 1,
                "a warp holds whole rows");
  constexpr ptx::BFloat16 kType{};
  const auto b_frags = right_mn_major<1>(b, 0);
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k) {
    uint32_t a_frag[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float(&from)[4] = a.tiles[0][2 * k + e / 2];
      a_frag[e] = ptx::pack2(kType, from[e % 2 * 2], from[e % 2 * 2 + 1]);
    }
#pragma unroll
    for (int j = 0; j < Columns / 32; ++j) {
      uint32_t bytes[4];  // from column 32 j on: groups of eight rows, then further chunks
      ptx::ldmatrix_x4_trans(bytes, b_frags.at(j, k));
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const Widened upper = widened(kType, bytes[2 * chunk]), lower = widened(kType, bytes[2 * chunk + 1]);
        const uint32_t even[2] = {upper.even, lower.even}, odd[2] = {upper.odd, lower.odd};
        ptx::mma_m16n8k16(kType, c.tiles[0][4 * j + 2 * chunk], a_frag, even);
        ptx::mma_m16n8k16(kType, c.tiles[0][4 * j + 2 * chunk + 1], a_frag, odd);
      }
    }
  }
}

// Return the matrix column that corresponds to column j of a thread's part of a `gemm_add_nn` product.
template <class Tile>
CUFLASH_DEVICE int interleaved_column(const Tile& c, int j) {
  return 2 * c.first_column() + 16 * (j / 4) + 2 * (j % 2) + j / 2 % 2;
}

// Store row i of a thread's part of a `gemm_add_nn` product to global memory, where the row starts at a multiple of 16
// bytes.
template <class Tile>
CUFLASH_DEVICE void store_interleaved_row(float* to, const Tile& c, int i) {
#pragma unroll
  for (int j = 0; j < Tile::kColumnTiles; j += 2) {
    const float *const even = &c.tiles[i / 2][j][i % 2 * 2], *const odd = &c.tiles[i / 2][j + 1][i % 2 * 2];
    *reinterpret_cast<Vector<float>*>(to + interleaved_column(c, 2 * j)) = {{even[0], odd[0], even[1], odd[1]}};
  }
}

}  // namespace cuflash::tile
