#include <attention/params.cuh>

// Keeps 96 values per thread, although two blocks of 1024 threads leave 32 registers for each.
extern "C" __global__ void __launch_bounds__(1024, 2)
    simt_spills(const __grid_constant__ cuflash::attention::Params params) {
  float* data = static_cast<float*>(params.o.data);
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = data[i * 1024 + threadIdx.x];
  for (int block = 0; block < params.shape.seqlen_q; ++block) {
#pragma unroll
    for (int i = 0; i < 96; ++i) values[i] = values[i] * values[(i * 7 + 3) % 96] + values[(i + 5) % 96];
  }
#pragma unroll
  for (int i = 0; i < 96; ++i) data[i * 1024 + threadIdx.x] = values[i];
}
