// Products of floats in swizzled tiles with tf32 on tensor cores. `probe` defines the sizes: kRows, kColumns, kDepth.
#include <tile/copy_async.cuh>
#include <tile/tf32.cuh>
using namespace cuflash;
using namespace cuflash::tile;
using probe::kColumns;
using probe::kDepth;
using probe::kRows;

constexpr int kNumWarps = 4;
using Product = WarpPartition<kRows, kColumns, kNumWarps>::Tile;
constexpr int kRowWarps = kRows < 16 * kNumWarps ? kRows / 16 : kNumWarps;
using InRows = WarpTile<kRows / (16 * kRowWarps), kColumns / 8, kRowWarps>;  // a warp holds full rows
using Next = WarpTile<kRows / (16 * kRowWarps), kDepth / 8, kRowWarps>;

constexpr SwizzledTile<float, kRows, kDepth> a_smem{0};
constexpr SwizzledTile<float, kDepth, kRows> a_tn_smem{a_smem.start + a_smem.kBytes};
constexpr SwizzledTile<float, kColumns, kDepth> b_nt_smem{a_tn_smem.start + a_tn_smem.kBytes};
constexpr SwizzledTile<float, kDepth, kColumns> b_nn_smem{b_nt_smem.start + b_nt_smem.kBytes};
constexpr SwizzledTile<float, kRows, kColumns> c_smem{b_nn_smem.start + b_nn_smem.kBytes};

template <class Tile>
CUFLASH_DEVICE void write(float* to, int pitch, Tile& tile) {
  for (int i = 0; i < Tile::kRows; ++i)
    for (int j = 0; j < Tile::kColumns; ++j)
      to[(tile.first_row() + tile.row(i)) * pitch + tile.first_column() + tile.column(j)] = tile.at(i, j);
}

// Computes a b_nt^T, a b_nn, 1000 + a_tn^T b_nn and 1000 + (a b_nt^T) b_nt, with a_tn [kDepth, kRows], b_nt [kColumns,
// kDepth], b_nn [kDepth, kColumns]; and the first product once more through shared memory.
extern "C" __global__ void __launch_bounds__(32 * kNumWarps)
products(float* a, float* a_tn, float* b_nt, float* b_nn, float* c_nt, float* c_nn, float* c_tn, float* c_next,
         float* c_stored) {
  load_async<32 * kNumWarps>(a_smem, Matrix<float>{a, kDepth, 1, kRows, kDepth});
  load_async<32 * kNumWarps>(a_tn_smem, Matrix<float>{a_tn, kRows, 1, kDepth, kRows});
  load_async<32 * kNumWarps>(b_nt_smem, Matrix<float>{b_nt, kDepth, 1, kColumns, kDepth});
  load_async<32 * kNumWarps>(b_nn_smem, Matrix<float>{b_nn, kColumns, 1, kDepth, kColumns});
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  Product c;
  gemm_nt(c, a_smem, b_nt_smem);
  write(c_nt, kColumns, c);
  if (Product::is_first_owner()) store(c_smem, c);
  gemm_nn(c, a_smem, b_nn_smem);
  write(c_nn, kColumns, c);
  c.fill(1000);
  gemm_add_tn(c, a_tn_smem, b_nn_smem);
  write(c_tn, kColumns, c);
  if (threadIdx.x / 32 < kRowWarps) {
    InRows p;
    gemm_nt(p, a_smem, b_nt_smem);
    Next next;
    next.fill(1000);
    gemm_add_nn(next, p, b_nt_smem);
    write(c_next, kDepth, next);
  }
  __syncthreads();
  store<32 * kNumWarps>(Matrix<float>{c_stored, kColumns, 1, kRows, kColumns}, c_smem);
}

// Writes the offset in shared memory, in words, of each word of 16 rows of kColumns floats.
extern "C" __global__ void places(int* words) {
  using Tile = SwizzledTile<float, 16, kColumns>;
  for (int x = threadIdx.x; x < 16 * kColumns; x += 32)
    words[x] = Tile::offset(x / kColumns, x % kColumns / 4) / 4 + x % 4;
}
