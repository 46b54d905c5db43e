#include <ptx/atomic.cuh>
#include <ptx/math.cuh>
#include <ptx/packed.cuh>
using namespace cuflash;

// Operations on floats that flush subnormal operands and results, then some that keep them. All numbers are positive.
extern "C" __global__ void subnormals(const float* x, const float* y, const double* z, const unsigned short* bits,
                                      float* flushed, float* kept, unsigned short* products, float* sums) {
  const int i = threadIdx.x;
  float* const to = flushed + 8 * i;
  to[0] = x[i] + y[i];
  to[1] = x[i] * y[i];
  to[2] = ptx::fma(x[i], y[i], x[i]);
  to[3] = fmaxf(x[i], y[i]);
  to[4] = x[i] < y[i] ? 1.0f : 2.0f;
  to[5] = ptx::log_accurate(x[i]);
  to[6] = static_cast<float>(z[i]);
  to[7] = ptx::pow_accurate(x[i], 0.5f);
  kept[4 * i] = ptx::min_or_nan(x[i], y[i]);
  const float negative = __uint_as_float(__float_as_uint(y[i]) | 0x80000000u);  // a GPU flushes -y[i]
  kept[4 * i + 1] = ptx::larger_magnitude(x[i], negative);
  kept[4 * i + 2] = ptx::rounded_to<float>(z[i]);
  kept[4 * i + 3] = ptx::to_float(ptx::BFloat16{bits[i]});
  const uint32_t both = bits[i] | 0x3f80u << 16;  // 0x3f80 is 1 as a bfloat16, and 1.875 as a float16
  const uint32_t of_bfloat16 = ptx::multiply2(ptx::BFloat16{}, both, 0x3f003f80u);  // times 1 and 1/2
  const uint32_t of_half = ptx::multiply2(ptx::Half{}, both, 0x38003800u);  // times 1/2
  products[2 * i] = static_cast<unsigned short>(of_bfloat16);
  products[2 * i + 1] = static_cast<unsigned short>(of_half);
  ptx::red_add(sums + i, x[i]);
}
