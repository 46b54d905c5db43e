// One product of doubles with the instruction for probe::kRows rows.
#include <ptx/mma.cuh>
using namespace cuflash;

extern "C" __global__ void mma_double(const double* a, const double* b, double* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  double* const upper = d + g * 8 + 2 * t;
  const double b_frag = b[t * 8 + g];
  if constexpr (probe::kRows == 8) {
    ptx::mma_m8n8k4(upper[0], upper[1], a[g * 4 + t], b_frag);
  } else {
    double* const lower = upper + 8 * 8;
    ptx::mma_m16n8k4(upper[0], upper[1], lower[0], lower[1], a[g * 4 + t], a[(g + 8) * 4 + t], b_frag);
  }
}
