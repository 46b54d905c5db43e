#include <ptx/math.cuh>
using namespace cuflash;

template <class T>
CUFLASH_DEVICE void library(const T* x, T* y, T* exact) {
  const int i = threadIdx.x;
  y[3 * i] = ptx::exp2_accurate(x[i]);
  y[3 * i + 1] = ptx::log_accurate(x[i]);
  y[3 * i + 2] = ptx::log2_accurate(x[i]);
  exact[0] = ptx::negative_infinity<T>();
  exact[1] = ptx::fma(exact[2], exact[2], exact[3]);
}

extern "C" __global__ void math(const float* x, float* half, float* bfloat16, unsigned* packed,
                                unsigned* packed_bfloat16, unsigned* tf32, float* power, float* reciprocal,
                                float* logarithm, int count, const float* single_x,
                                float* single_y, float* single_exact, const double* double_x, double* double_y,
                                double* double_exact) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    half[i] = ptx::to_float(ptx::Half{static_cast<unsigned short>(i)});
    bfloat16[i] = ptx::to_float(ptx::BFloat16{static_cast<unsigned short>(i)});
    packed[i] = ptx::pack2(ptx::Half{}, x[i], -x[i]) ^ ptx::from_float<ptx::Half>(x[i]).bits;
    packed_bfloat16[i] = ptx::pack2(ptx::BFloat16{}, x[i], 1.0f) ^ ptx::from_float<ptx::BFloat16>(x[i]).bits << 16;
    // PTX leaves NaN unspecified
    tf32[i] = x[i] == x[i] ? ptx::to_tf32(ptx::from_float<float>(ptx::to_float(x[i]))) : 0;
    power[i] = ptx::exp2_approx(x[i]);
    reciprocal[i] = ptx::reciprocal_approx(x[i]);
    logarithm[i] = ptx::log2_approx(x[i]) + (x[i] < 0.5f || x[i] > 2 ? 0.0f : 2.0f);  // near 1 the error is absolute
  }
  if (blockIdx.x > 0) return;
  library(single_x, single_y, single_exact);
  library(double_x, double_y, double_exact);
}
