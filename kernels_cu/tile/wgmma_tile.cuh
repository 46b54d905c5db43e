#pragma once
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <tile/copy_async.cuh>
#include <tile/swizzled_tile.cuh>

// Matrices in shared memory in the layout that TMA writes and wgmma reads.
namespace cuflash::tile {

// Return the number of columns of a panel, which is as wide as the widest swizzle, 128 bytes, or half as wide.
template <class T = ptx::Half>
constexpr CUFLASH_DEVICE int panel_width(int columns) {
  constexpr int kWidest = 128 / static_cast<int>(sizeof(T));
  return columns % kWidest == 0 ? kWidest : kWidest / 2;
}

// A matrix as panels side by side, each as wide as the swizzle. Each panel starts at a multiple of 1024 bytes.
template <class T, int Rows, int Columns, int Width = panel_width<T>(Columns)>
struct WgmmaTile {
  using Element = T;
  static constexpr int kRows = Rows;
  static constexpr int kColumns = Columns;
  static constexpr int kPanelWidth = Width;
  static constexpr int kNumPanels = Columns / kPanelWidth;
  using Panel = SwizzledTile<T, Rows, kPanelWidth>;
  static constexpr int kRowBytes = static_cast<int>(sizeof(T)) * kPanelWidth;
  static constexpr ptx::Swizzle kSwizzle = kRowBytes == 128 ? ptx::Swizzle::k128 : ptx::Swizzle::k64;
  static constexpr int kDepth = 32 / static_cast<int>(sizeof(T));  // columns that one product sums over
  static constexpr int kBytes = kNumPanels * Panel::kBytes;
  static_assert(Columns % kPanelWidth == 0 && Panel::kBytes % 1024 == 0, "swizzles repeat after 1024 bytes at most");

  int start;  // bytes from the start of shared memory

  CUFLASH_DEVICE Panel panel(int number) const { return {start + number * Panel::kBytes}; }
};

// Return a tile that is equal in all threads of a warp, in a form that lets the compiler prove this: it then keeps the
// start in one uniform register, and issues products without gaps.
template <class Tile>
CUFLASH_DEVICE Tile warp_uniform(Tile tile) {
  return {__shfl_sync(0xffffffffu, tile.start, 0)};
}

// The descriptor of an operand in shared memory; `at` returns the descriptor of the part that starts `bytes` later.
template <ptx::Swizzle kSwizzle, int kLeadingBytes, int kStrideBytes>
class WgmmaDescriptor {
 public:
  WgmmaDescriptor() = default;
  explicit CUFLASH_DEVICE WgmmaDescriptor(uint32_t address) : low_word_(static_cast<uint32_t>(descriptor(address))) {}
  CUFLASH_DEVICE uint64_t at(int bytes) const { return descriptor(0) >> 32 << 32 | (low_word_ + bytes / 16); }
  CUFLASH_DEVICE void materialize() { low_word_ = ptx::opaque(low_word_); }  // compute the word here, not at its use

 private:
  static constexpr CUFLASH_DEVICE uint64_t descriptor(uint32_t address) {
    return ptx::wgmma_descriptor(kSwizzle, address, kLeadingBytes, kStrideBytes);
  }

  uint32_t low_word_;  // the half of the descriptor that contains the address
};

// An operand whose rows run along the summed dimension: rows of the matrix are rows of a, or columns of b. `at(k)`
// returns the descriptor of the k-th group of kDepth columns.
template <class Tile>
struct KMajor {
  WgmmaDescriptor<Tile::kSwizzle, 0, 8 * Tile::kRowBytes> descriptor;

  KMajor() = default;
  explicit CUFLASH_DEVICE KMajor(Tile tile, int first_row = 0) : descriptor(tile.panel(0).address(first_row, 0)) {}
  CUFLASH_DEVICE uint64_t at(int k) const {
    const int column = Tile::kDepth * k, panel = column / Tile::kPanelWidth;
    return descriptor.at(panel * Tile::Panel::kBytes + column % Tile::kPanelWidth * (32 / Tile::kDepth));
  }
};

// An operand whose rows run across the summed dimension. `at(k)` returns the descriptor of the k-th group of 16 rows.
template <class Tile>
struct MnMajor {
  WgmmaDescriptor<Tile::kSwizzle, Tile::Panel::kBytes, 8 * Tile::kRowBytes> descriptor;

  MnMajor() = default;
  explicit CUFLASH_DEVICE MnMajor(Tile tile, int first_panel = 0)
      : descriptor(tile.panel(first_panel).address(0, 0)) {}
  CUFLASH_DEVICE uint64_t at(int k) const { return descriptor.at(16 * k * Tile::kRowBytes); }
};

// A thread's registers of a product, in the order that wgmma expects.
template <class Tile>
using Accumulators = float[4 * Tile::kColumnTiles];
template <class Tile>
CUFLASH_DEVICE Accumulators<Tile>& accumulators(Tile& tile) {
  static_assert(Tile::kRowTiles == 1, "a warp has 16 of a warpgroup's 64 rows");
  return reinterpret_cast<Accumulators<Tile>&>(tile.tiles);
}

// A product rounded to T, as the left operand of the next product.
template <class T, class Tile>
struct PackedOperand {
  static constexpr int kColumnTiles = Tile::kColumnTiles;
  // an odd number of columns leaves half of the last fragment unused
  static constexpr int kNumFragments = (kColumnTiles + 1) / 2;

  uint32_t fragments[kNumFragments][4];

  CUFLASH_DEVICE void operator=(const Tile& from) {
#pragma unroll
    for (int k = 0; k < kNumFragments; ++k) pack(from, k);
  }
  CUFLASH_DEVICE void clear() {
#pragma unroll
    for (auto& fragment : fragments)
#pragma unroll
      for (uint32_t& pair : fragment) pair = 0;
  }
  // Pack 16 columns.
  CUFLASH_DEVICE void pack(const Tile& from, int k) {
#pragma unroll
    for (int e = 0; e < 4 && 2 * k + e / 2 < kColumnTiles; ++e) {
      const float(&pair)[4] = from.tiles[0][2 * k + e / 2];
      fragments[k][e] = ptx::pack2(T{}, pair[e % 2 * 2], pair[e % 2 * 2 + 1]);
    }
  }
};

// A product rounded to e4m3, as the left operand of the next product. Dimension k of the other operand has the order of
// `e4m3_column`, so that each thread already holds all the numbers that it needs.
template <class Tile>
struct E4M3Operand {
  static constexpr int kNumFragments = Tile::kColumnTiles / 4;
  static_assert(Tile::kColumnTiles % 4 == 0, "a product sums over 32 columns");

  uint32_t fragments[kNumFragments][4];

  CUFLASH_DEVICE void operator=(const Tile& from) {
#pragma unroll
    for (int k = 0; k < kNumFragments; ++k) pack(from, k);
  }
  // Pack 32 columns.
  CUFLASH_DEVICE void pack(const Tile& from, int k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // rows g and g + 8 of the first 16 columns, then of the last 16
      const auto& left = from.tiles[0][4 * k + e / 2 * 2];
      const auto& right = from.tiles[0][4 * k + e / 2 * 2 + 1];
      const int row = e % 2 * 2;
      fragments[k][e] = ptx::pack4(ptx::Float8E4M3{}, left[row], left[row + 1], right[row], right[row + 1]);
    }
  }
};

// Return the column of a product that is at `place` of an E4M3Operand: of every 16 columns, thread t of four holds 2t,
// 2t + 1, 2t + 8 and 2t + 9, in this order.
constexpr CUFLASH_DEVICE int e4m3_column(int place) {
  const int thread = place % 16 / 4, element = place % 4;
  return place / 16 * 16 + element / 2 * 8 + thread * 2 + element % 2;
}

// Products of a warpgroup, which run asynchronously: until a wait for their group returns, no thread may touch their
// operands and results, and the registers must stay in place.

// c = a b^T
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_gemm_nt(Tile& c, KMajor<A> a, KMajor<B> b) {
  static_assert(A::kColumns == B::kColumns, "both operands have the summed dimension");
  ptx::fence_registers(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < A::kColumns / A::kDepth; ++k)
    ptx::wgmma<ptx::Major::kK, ptx::Major::kK>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), k > 0);
  ptx::wgmma_commit();
}

// c += a b^T
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_gemm_add_nt(Tile& c, KMajor<A> a, KMajor<B> b) {
  static_assert(A::kColumns == B::kColumns, "both operands have the summed dimension");
  ptx::fence_registers(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < A::kColumns / 16; ++k)
    ptx::wgmma<ptx::Major::kK, ptx::Major::kK>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), true);
  ptx::wgmma_commit();
}

// c = a b
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_gemm_nn(Tile& c, KMajor<A> a, MnMajor<B> b) {
  static_assert(A::kColumns == B::kRows, "both operands have the summed dimension");
  ptx::fence_registers(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < B::kRows / 16; ++k)
    ptx::wgmma<ptx::Major::kK, ptx::Major::kMN>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), k > 0);
  ptx::wgmma_commit();
}

// c = a^T b
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_gemm_tn(Tile& c, MnMajor<A> a, MnMajor<B> b) {
  static_assert(A::kRows == B::kRows, "both operands have the summed dimension");
  ptx::fence_registers(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < A::kRows / 16; ++k)
    ptx::wgmma<ptx::Major::kMN, ptx::Major::kMN>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), k > 0);
  ptx::wgmma_commit();
}

// c += a^T b^T for the first panel of a.
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_gemm_add_tt(Tile& c, MnMajor<A> a, KMajor<B> b) {
  static_assert(A::kPanelWidth == 64 && A::kRows == B::kColumns, "a panel has the 64 rows of a warpgroup");
  ptx::fence_registers(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < A::kRows / 16; ++k)
    ptx::wgmma<ptx::Major::kMN, ptx::Major::kK>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), true);
  ptx::wgmma_commit();
}

// c += a b
template <class Tile, class Left, class T, int Depth, int Columns>
CUFLASH_DEVICE void start_gemm_add_nn(Tile& c, const PackedOperand<T, Left>& a,
                                      MnMajor<WgmmaTile<T, Depth, Columns>> b) {
  ptx::fence_registers(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k)
    ptx::wgmma<ptx::Major::kMN>(T{}, accumulators(c), a.fragments[k], b.at(k), true);
  ptx::wgmma_commit();
}

// c = a b^T, or c += a b^T if `adds`, where b's columns have the order of `e4m3_column`
template <class Tile, class Left, class B>
CUFLASH_DEVICE void start_gemm_nt(Tile& c, const E4M3Operand<Left>& a, KMajor<B> b, bool adds) {
  static_assert(B::kColumns == 32 * E4M3Operand<Left>::kNumFragments, "both operands have the summed dimension");
  ptx::fence_registers(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < B::kColumns / 32; ++k)
    ptx::wgmma<ptx::Major::kK>(ptx::Float8E4M3{}, accumulators(c), a.fragments[k], b.at(k), adds || k > 0);
  ptx::wgmma_commit();
}

// Wait until at most kPending groups of products are in flight; `c` must belong to a completed group.
template <int kPending, class Tile>
CUFLASH_DEVICE void wait_wgmma(Tile& c) {
  ptx::wgmma_wait<kPending>();
  ptx::fence_registers(accumulators(c));
}
// Keep other accesses to an operand's registers from moving across this line. Call it after the wait for the products
// that read the operand, before its registers are packed again.
template <class T, class Left>
CUFLASH_DEVICE void fence_registers(PackedOperand<T, Left>& a) {
#pragma unroll
  for (int k = 0; k < a.kNumFragments; ++k) ptx::fence_registers(a.fragments[k]);
}

// Store a warpgroup's rounded product to shared memory; the warp's rows start at first_row. Called by whole warps.
template <class Tile, class T, class Left>
CUFLASH_DEVICE void store(Tile to, const PackedOperand<T, Left>& from, int first_row) {
  using Panel = typename Tile::Panel;
  static_assert(Tile::kColumns == 8 * Left::kColumnTiles, "a row of the tile has all columns of the product");
  constexpr int kNumFragments = Panel::kChunks / 2;
  const uint32_t start = to.panel(0).address(first_row + ptx::lane() % 16, ptx::lane() / 16);
#pragma unroll
  for (int k = 0; k < from.kNumFragments; ++k)
    ptx::stmatrix_x4(Panel::advanced(start, 0, k % kNumFragments * 2) + k / kNumFragments * Panel::kBytes,
                     from.fragments[k]);
}

// Store a warpgroup's rounded and transposed product to shared memory: its rows become columns of the panels, the
// warp's from first_column on, and its columns become rows, from first_row on. `transposed_address` returns the address
// to which a thread stores; the functions after it store 16 columns of the product, or all. Called by whole warps.
template <class Tile>
CUFLASH_DEVICE uint32_t transposed_address(Tile to, int first_column, int first_row = 0) {
  constexpr int kChunk = Tile::Panel::kChunk;
  const int lane = ptx::lane(), column = first_column + lane / 8 % 2 * kChunk;
  return to.panel(column / to.kPanelWidth)
      .address(first_row + lane / 16 * 8 + lane % 8, column % to.kPanelWidth / kChunk);
}
template <class Tile, class T, class Left>
CUFLASH_DEVICE void store_transposed(uint32_t address, const PackedOperand<T, Left>& from, int k) {
  ptx::stmatrix_x4_trans(Tile::Panel::advanced(address, 16 * k, 0), from.fragments[k]);
}
template <class Tile, class T, class Left>
CUFLASH_DEVICE void store_transposed(uint32_t address, const PackedOperand<T, Left>& from) {
  using Panel = typename Tile::Panel;
#pragma unroll
  for (int k = 0; k < from.kColumnTiles / 2; ++k) store_transposed<Tile>(address, from, k);
  if constexpr (Left::kColumnTiles % 2 != 0) {
    const auto& last = from.fragments[from.kNumFragments - 1];
    const uint32_t pair[2] = {last[0], last[1]};
    ptx::stmatrix_x2_trans(Panel::advanced(address, 16 * (from.kNumFragments - 1), 0), pair);
  }
}
template <class Tile, class T, class Left>
CUFLASH_DEVICE void store_transposed(Tile to, const PackedOperand<T, Left>& from, int first_column, int first_row = 0) {
  store_transposed<Tile>(transposed_address(to, first_column, first_row), from);
}

}  // namespace cuflash::tile
