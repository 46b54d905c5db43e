#include <ptx/math.cuh>
using namespace cuflash;

extern "C" __global__ void packs(const float* x, uint32_t* packed, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    packed[i] = ptx::pack4(ptx::Float8E4M3{}, x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}
