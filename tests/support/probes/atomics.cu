#include <ptx/atomic.cuh>

extern "C" __global__ void atomics(float* sums, int* extremes, int* lock, int* counter, unsigned* bits, float* reduced,
                                   double* wide_reduced, int* next, int* taken) {
  atomicAdd(taken + cuflash::ptx::fetch_add(next, 2), 1);
  cuflash::ptx::red_add(reduced + threadIdx.x % 32, threadIdx.x + 0.5f);
  cuflash::ptx::red_add(wide_reduced + threadIdx.x % 32, threadIdx.x + 0.5);
  atomicAdd(sums, static_cast<float>(threadIdx.x));
  atomicMax(extremes, static_cast<int>(threadIdx.x));
  atomicMin(extremes + 1, -static_cast<int>(threadIdx.x));
  atomicOr(bits, 1u << threadIdx.x % 32);
  if (threadIdx.x % 32 == 0) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    const int row_mask = *counter;
    __nanosleep(20);
    *counter = row_mask + 1;
    __threadfence();
    atomicExch(lock, 0);
  }
}
