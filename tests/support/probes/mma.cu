#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/mma.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;

// Loads operands with the instructions meant for mma: ldmatrix of a, and of b's columns stored as rows.
template <class T>
CUFLASH_DEVICE void mma_over_k(const uint16_t* a, const uint16_t* b_columns, float* d) {
  uint16_t* shared = ptx::dynamic_shared<uint16_t>();
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) shared[8 * lane + i] = a[8 * lane + i];
  for (int i = 0; i < 4; ++i) shared[256 + 4 * lane + i] = b_columns[4 * lane + i];
  __syncwarp();
  uint32_t a_frag[4], b_frag[2];
  ptx::ldmatrix_x4(a_frag, ptx::shared_address(shared + lane % 16 * 16 + lane / 16 * 8));
  ptx::ldmatrix_x2(b_frag, ptx::shared_address(shared + 256 + lane % 8 * 16 + lane / 8 % 2 * 8));
  float frag[4];
  for (int i = 0; i < 4; ++i) frag[i] = d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
  ptx::mma_m16n8k16(T{}, frag, a_frag, b_frag);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = frag[i];
  __syncwarp();
}

extern "C" __global__ void mma(const uint16_t* half_a, const uint16_t* half_b, float* half_d,
                               const uint16_t* bfloat16_a, const uint16_t* bfloat16_b, float* bfloat16_d,
                               const float* a, const float* b, float* d) {
  mma_over_k<ptx::Half>(half_a, half_b, half_d);
  mma_over_k<ptx::BFloat16>(bfloat16_a, bfloat16_b, bfloat16_d);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const uint32_t a_frag[4] = {ptx::to_tf32(a[g * 8 + t]), ptx::to_tf32(a[(g + 8) * 8 + t]),
                              ptx::to_tf32(a[g * 8 + t + 4]), ptx::to_tf32(a[(g + 8) * 8 + t + 4])};
  const uint32_t b_frag[2] = {ptx::to_tf32(b[t * 8 + g]), ptx::to_tf32(b[(t + 4) * 8 + g])};
  float frag[4];
  for (int i = 0; i < 4; ++i) frag[i] = d[(g + i / 2 * 8) * 8 + t * 2 + i % 2];
  ptx::mma_m16n8k8_tf32(frag, a_frag, b_frag);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = frag[i];
}
