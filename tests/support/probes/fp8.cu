// o = p v, where p = q k^T is rounded to e4m3 in registers: q [64, kDepth], k [kKeys, kDepth], and v transposed,
// [kValues, kKeys], with its columns in the order of `e4m3_column`.
#include <ptx/shared.cuh>
#include <ptx/tma.cuh>
#include <tile/warp_tile.cuh>
#include <tile/wgmma_tile.cuh>
using namespace cuflash;
using ptx::Float8E4M3;

using SmemQ = tile::WgmmaTile<Float8E4M3, 64, probe::kDepth>;
using SmemK = tile::WgmmaTile<Float8E4M3, probe::kKeys, probe::kDepth>;
using SmemV = tile::WgmmaTile<Float8E4M3, probe::kValues, probe::kKeys>;
using P = tile::WarpTile<1, probe::kKeys / 8, 4>;
using O = tile::WarpTile<1, probe::kValues / 8, 4>;

template <class Tile>
CUFLASH_DEVICE void load(Tile to, const uint4* from) {
  constexpr int kChunks = Tile::kColumns / 16, kInPanel = Tile::kPanelWidth / 16;
  for (int i = threadIdx.x; i < Tile::kRows * kChunks; i += blockDim.x) {
    const int row = i / kChunks, chunk = i % kChunks;
    const auto panel = to.panel(chunk / kInPanel);
    *panel.template pointer<uint4>(panel.offset(row, chunk % kInPanel)) = from[i];
  }
}

extern "C" __global__ void __launch_bounds__(128)
two_products(const uint4* q, const uint4* k, const uint4* v, int* columns, float* scores, float* o) {
  const SmemQ q_smem{0};
  const SmemK k_smem{SmemQ::kBytes};
  const SmemV v_smem{SmemQ::kBytes + SmemK::kBytes};
  for (int place = threadIdx.x; place < probe::kKeys; place += blockDim.x) columns[place] = tile::e4m3_column(place);
  load(q_smem, q);
  load(k_smem, k);
  load(v_smem, v);
  ptx::fence_proxy_async();
  __syncthreads();
  P p;
  tile::start_gemm_nt(p, tile::KMajor<SmemQ>(q_smem), tile::KMajor<SmemK>(k_smem));
  tile::wait_wgmma<0>(p);
  tile::E4M3Operand<P> rounded;
  rounded = p;
  O sum;
  tile::start_gemm_nt(sum, rounded, tile::KMajor<SmemV>(v_smem), false);
  tile::wait_wgmma<0>(sum);
  for (int i = 0; i < P::kRows; ++i) {
    const int row = p.first_row() + P::row(i);
    for (int j = 0; j < P::kColumns; ++j) scores[row * probe::kKeys + p.first_column() + P::column(j)] = p.at(i, j);
    for (int j = 0; j < O::kColumns; ++j) o[row * probe::kValues + p.first_column() + O::column(j)] = sum.at(i, j);
  }
}
