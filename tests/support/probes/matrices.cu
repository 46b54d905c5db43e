#include <ptx/ldmatrix.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;

struct Params {
  const uint16_t* memory;      // 32 rows of 8
  const int* rows;             // one row per lane
  const uint32_t* fragments;   // 32 lanes of 4
  uint32_t* loaded;            // 6 forms, 32 lanes of 4
  uint16_t* stored;            // 6 forms, 32 rows of 8
};

CUFLASH_DEVICE void fill(uint16_t* shared, const uint16_t* from) {
  for (int i = 0; i < 8; ++i) shared[8 * threadIdx.x + i] = from ? from[8 * threadIdx.x + i] : 0;
  __syncwarp();
}

template <int kMatrices, class Load, class Store>
CUFLASH_DEVICE void both(const Params& params, int form, Load load, Store store) {
  uint16_t* shared = ptx::dynamic_shared<uint16_t>();
  const uint32_t address = ptx::shared_address(shared + 8 * params.rows[threadIdx.x]);
  uint32_t matrices[kMatrices];
  fill(shared, params.memory);
  load(matrices, address);
  for (int i = 0; i < kMatrices; ++i) params.loaded[(form * 32 + threadIdx.x) * 4 + i] = matrices[i];
  __syncwarp();
  fill(shared, nullptr);
  for (int i = 0; i < kMatrices; ++i) matrices[i] = params.fragments[4 * threadIdx.x + i];
  store(address, matrices);
  __syncwarp();
  for (int i = 0; i < 8; ++i) params.stored[(form * 32 + threadIdx.x) * 8 + i] = shared[8 * threadIdx.x + i];
  __syncwarp();
}

extern "C" __global__ void matrices(const uint16_t* memory, const int* rows, const uint32_t* fragments, uint32_t* loaded,
                                    uint16_t* stored) {
  const Params params{memory, rows, fragments, loaded, stored};
  both<1>(params, 0, [](uint32_t (&m)[1], uint32_t a) { ptx::ldmatrix_x1(m, a); },
          [](uint32_t a, uint32_t (&m)[1]) { ptx::stmatrix_x1(a, m); });
  both<2>(params, 1, [](uint32_t (&m)[2], uint32_t a) { ptx::ldmatrix_x2(m, a); },
          [](uint32_t a, uint32_t (&m)[2]) { ptx::stmatrix_x2(a, m); });
  both<4>(params, 2, [](uint32_t (&m)[4], uint32_t a) { ptx::ldmatrix_x4(m, a); },
          [](uint32_t a, uint32_t (&m)[4]) { ptx::stmatrix_x4(a, m); });
  both<1>(params, 3, [](uint32_t (&m)[1], uint32_t a) { ptx::ldmatrix_x1_trans(m, a); },
          [](uint32_t a, uint32_t (&m)[1]) { ptx::stmatrix_x1_trans(a, m); });
  both<2>(params, 4, [](uint32_t (&m)[2], uint32_t a) { ptx::ldmatrix_x2_trans(m, a); },
          [](uint32_t a, uint32_t (&m)[2]) { ptx::stmatrix_x2_trans(a, m); });
  both<4>(params, 5, [](uint32_t (&m)[4], uint32_t a) { ptx::ldmatrix_x4_trans(m, a); },
          [](uint32_t a, uint32_t (&m)[4]) { ptx::stmatrix_x4_trans(a, m); });
}
