#pragma once
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <tile/async_copy.cuh>
#include <tile/swizzled_tile.cuh>

// Matrices in shared memory as the tensor memory accelerator brings them and warpgroups multiply them.
namespace cuflash::tile {

constexpr CUFLASH_DEVICE int panel_width(int columns) { return columns % 64 == 0 ? 64 : 32; }

// Panels side by side, each as wide as a swizzle. It starts at a multiple of 1024 bytes, and so does each panel.
template <class T, int Rows, int Columns, int Width = panel_width(Columns)>
struct PanelTile {
  using Element = T;
  static constexpr int kRows = Rows;
  static constexpr int kColumns = Columns;
  static constexpr int kPanelWidth = Width;
  static constexpr int kPanels = Columns / kPanelWidth;
  using Panel = SwizzledTile<T, Rows, kPanelWidth>;
  static constexpr ptx::Swizzle kSwizzle = kPanelWidth == 64 ? ptx::Swizzle::k128 : ptx::Swizzle::k64;
  static constexpr int kRowBytes = 2 * kPanelWidth;
  static constexpr int kBytes = kPanels * Panel::kBytes;
  static_assert(Columns % kPanelWidth == 0 && Panel::kBytes % 1024 == 0, "swizzles repeat after 1024 bytes at most");

  int start;

  CUFLASH_DEVICE Panel panel(int number) const { return {start + number * Panel::kBytes}; }
};

// The same for all threads of a warp, where the compiler does not know: then a single register serves them all, and products
// follow each other at once.
template <class Tile>
CUFLASH_DEVICE Tile of_warp(Tile tile) {
  return {__shfl_sync(0xffffffffu, tile.start, 0)};
}

// Where an operand lies, and what is further on in it.
template <ptx::Swizzle kSwizzle, int kLeadingBytes, int kStrideBytes>
class InPanels {
 public:
  InPanels() = default;
  explicit CUFLASH_DEVICE InPanels(uint32_t address) : low_(static_cast<uint32_t>(matrix(address))) {}
  CUFLASH_DEVICE uint64_t at(int bytes) const { return matrix(0) >> 32 << 32 | (low_ + bytes / 16); }
  CUFLASH_DEVICE void settle() { low_ = ptx::opaque(low_); }  // reckoned here, not where it is used

 private:
  static constexpr CUFLASH_DEVICE uint64_t matrix(uint32_t address) {
    return ptx::wgmma_matrix(kSwizzle, address, kLeadingBytes, kStrideBytes);
  }

  uint32_t low_;  // the half with the address
};

// Operands of a product: where 16 columns of the left one, or as many of what the sum runs over, start.

// Rows of the matrix are rows of a, or columns of b.
template <class Tile>
struct RowsAlongSum {
  InPanels<Tile::kSwizzle, 0, 8 * Tile::kRowBytes> matrix;

  RowsAlongSum() = default;
  explicit CUFLASH_DEVICE RowsAlongSum(Tile tile, int first_row = 0) : matrix(tile.panel(0).address(first_row, 0)) {}
  CUFLASH_DEVICE uint64_t at(int k) const {
    const int column = 16 * k, panel = column / Tile::kPanelWidth;
    return matrix.at(panel * Tile::Panel::kBytes + column % Tile::kPanelWidth * 2);
  }
};

// Rows of the matrix are what the sum runs over.
template <class Tile>
struct RowsAcrossSum {
  InPanels<Tile::kSwizzle, Tile::Panel::kBytes, 8 * Tile::kRowBytes> matrix;

  RowsAcrossSum() = default;
  explicit CUFLASH_DEVICE RowsAcrossSum(Tile tile, int first_panel = 0)
      : matrix(tile.panel(first_panel).address(0, 0)) {}
  CUFLASH_DEVICE uint64_t at(int k) const { return matrix.at(16 * k * Tile::kRowBytes); }
};

// A warp's part of a product's result, 16 rows a warp, as wgmma counts its registers.
template <class Tile>
using Accumulators = float[4 * Tile::kColumnTiles];
template <class Tile>
CUFLASH_DEVICE Accumulators<Tile>& accumulators(Tile& tile) {
  static_assert(Tile::kRowTiles == 1, "a warp has 16 of a warpgroup's 64 rows");
  return reinterpret_cast<Accumulators<Tile>&>(tile.tiles);
}

// A product rounded to T, as the left operand of the next.
template <class T, class Tile>
struct Rounded {
  static constexpr int kColumnTiles = Tile::kColumnTiles;
  static constexpr int kSteps = (kColumnTiles + 1) / 2;  // an odd one is the half of the last, which is no operand

  uint32_t fragments[kSteps][4];

  CUFLASH_DEVICE void operator=(const Tile& from) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) round(from, k);
  }
  CUFLASH_DEVICE void round(const Tile& from, int k) {  // 16 columns of it
#pragma unroll
    for (int e = 0; e < 4 && 2 * k + e / 2 < kColumnTiles; ++e) {
      const float(&pair)[4] = from.tiles[0][2 * k + e / 2];
      fragments[k][e] = ptx::pack2(T{}, pair[e % 2 * 2], pair[e % 2 * 2 + 1]);
    }
  }
};

// Products of a warpgroup, which run on: nobody touches what they read and write until their group is waited for, and
// the registers are kept in place then.

// c = a b^T
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_product_nt(Tile& c, RowsAlongSum<A> a, RowsAlongSum<B> b) {
  static_assert(A::kColumns == B::kColumns, "what the sum runs over");
  ptx::keep_in_place(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < A::kColumns / 16; ++k)
    ptx::wgmma<ptx::Major::kK, ptx::Major::kK>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), k > 0);
  ptx::wgmma_commit();
}

// c = a b
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_product_nn(Tile& c, RowsAlongSum<A> a, RowsAcrossSum<B> b) {
  static_assert(A::kColumns == B::kRows, "what the sum runs over");
  ptx::keep_in_place(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < B::kRows / 16; ++k)
    ptx::wgmma<ptx::Major::kK, ptx::Major::kMN>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), k > 0);
  ptx::wgmma_commit();
}

// c = a^T b
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_product_tn(Tile& c, RowsAcrossSum<A> a, RowsAcrossSum<B> b) {
  static_assert(A::kRows == B::kRows, "what the sum runs over");
  ptx::keep_in_place(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < A::kRows / 16; ++k)
    ptx::wgmma<ptx::Major::kMN, ptx::Major::kMN>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), k > 0);
  ptx::wgmma_commit();
}

// c += a^T b^T for the first panel of a.
template <class Tile, class A, class B>
CUFLASH_DEVICE void start_sum_tt(Tile& c, RowsAcrossSum<A> a, RowsAlongSum<B> b) {
  static_assert(A::kPanelWidth == 64 && A::kRows == B::kColumns, "a panel has a warpgroup's rows");
  ptx::keep_in_place(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < A::kRows / 16; ++k)
    ptx::wgmma<ptx::Major::kMN, ptx::Major::kK>(typename A::Element{}, accumulators(c), a.at(k), b.at(k), true);
  ptx::wgmma_commit();
}

// c += a b
template <class Tile, class Left, class T, int Depth, int Columns>
CUFLASH_DEVICE void start_sum_nn(Tile& c, const Rounded<T, Left>& a, RowsAcrossSum<PanelTile<T, Depth, Columns>> b) {
  ptx::keep_in_place(accumulators(c));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k)
    ptx::wgmma<ptx::Major::kMN>(T{}, accumulators(c), a.fragments[k], b.at(k), true);
  ptx::wgmma_commit();
}

// Wait until at most kPending groups of products are under way; `c` is of one that is not.
template <int kPending, class Tile>
CUFLASH_DEVICE void wait_for(Tile& c) {
  ptx::wgmma_wait<kPending>();
  ptx::keep_in_place(accumulators(c));
}
template <class T, class Left>
CUFLASH_DEVICE void keep_in_place(Rounded<T, Left>& a) {
#pragma unroll
  for (int k = 0; k < a.kSteps; ++k) ptx::keep_in_place(a.fragments[k]);
}

// Put a warpgroup's product, rounded, into shared memory, the warp's rows from first_row on. Called by whole warps.
template <class Tile, class T, class Left>
CUFLASH_DEVICE void store(Tile to, const Rounded<T, Left>& from, int first_row) {
  using Panel = typename Tile::Panel;
  static_assert(Tile::kColumns == 8 * Left::kColumnTiles, "all its columns");
  constexpr int kSteps = Panel::kChunks / 2;
  const uint32_t start = to.panel(0).address(first_row + ptx::lane() % 16, ptx::lane() / 16);
#pragma unroll
  for (int k = 0; k < from.kSteps; ++k)
    ptx::stmatrix_x4(Panel::moved(start, 0, k % kSteps * 2) + k / kSteps * Panel::kBytes, from.fragments[k]);
}

// Put a warpgroup's product, rounded and transposed, into shared memory: its rows are columns of the panels, the warp's
// from first_column on, and its columns their rows from first_row on. Called by whole warps.
template <class Tile>
CUFLASH_DEVICE uint32_t place_transposed(Tile to, int first_column, int first_row = 0) {  // of the thread
  constexpr int kChunk = Tile::Panel::kChunk;
  const int lane = ptx::lane(), column = first_column + lane / 8 % 2 * kChunk;
  return to.panel(column / to.kPanelWidth)
      .address(first_row + lane / 16 * 8 + lane % 8, column % to.kPanelWidth / kChunk);
}
template <class Tile, class T, class Left>
CUFLASH_DEVICE void store_transposed(uint32_t place, const Rounded<T, Left>& from, int k) {  // 16 columns of it
  ptx::stmatrix_x4_trans(Tile::Panel::moved(place, 16 * k, 0), from.fragments[k]);
}
template <class Tile, class T, class Left>
CUFLASH_DEVICE void store_transposed(uint32_t place, const Rounded<T, Left>& from) {
  using Panel = typename Tile::Panel;
#pragma unroll
  for (int k = 0; k < from.kColumnTiles / 2; ++k) store_transposed<Tile>(place, from, k);
  if constexpr (Left::kColumnTiles % 2 != 0) {
    const auto& last = from.fragments[from.kSteps - 1];
    const uint32_t pair[2] = {last[0], last[1]};
    ptx::stmatrix_x2_trans(Panel::moved(place, 16 * (from.kSteps - 1), 0), pair);
  }
}
template <class Tile, class T, class Left>
CUFLASH_DEVICE void store_transposed(Tile to, const Rounded<T, Left>& from, int first_column, int first_row = 0) {
  store_transposed<Tile>(place_transposed(to, first_column, first_row), from);
}

}  // namespace cuflash::tile
