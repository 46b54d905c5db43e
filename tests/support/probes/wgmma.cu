// d [64, N] = a [64, 64] b [64, N], or d + a b, for every form of operands. `probe` defines the element type T; for
// 8-bit elements the sum runs over 128.
#include <ptx/shared.cuh>
#include <ptx/tma.cuh>
#include <ptx/wgmma.cuh>
using namespace cuflash;
using probe::T;

// One of the two matrices in shared memory: its layout, and the offsets of the four blocks of 16 k.
struct Operand { int swizzle, leading, stride, starts[4]; };
// a: 0 K-major, 1 MN-major, 2 in registers; b: 0 or 1.
struct Form { int a_major, b_major; Operand a, b; };

CUFLASH_DEVICE uint64_t matrix(const Operand& operand, uint32_t address, int block) {
  return ptx::wgmma_descriptor(static_cast<ptx::Swizzle>(operand.swizzle), address + operand.starts[block],
                               operand.leading,
                               operand.stride);
}

template <int kMajorA, int kMajorB, int kCount>
CUFLASH_DEVICE void mma_over_k(const Form& form, float (&d)[kCount], uint32_t address, const uint32_t* fragments,
                               bool adds) {
  constexpr ptx::Major kB = kMajorB == 0 ? ptx::Major::kK : ptx::Major::kMN;
  uint32_t a[4][4];
#pragma unroll
  for (int block = 0; block < 4; ++block)
    for (int i = 0; i < 4; ++i) a[block][i] = fragments[(block * 128 + threadIdx.x) * 4 + i];
  ptx::fence_registers(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const uint64_t b = matrix(form.b, address + 8192, block);
    if constexpr (kMajorA == 2)
      ptx::wgmma<kB>(T{}, d, a[block], b, adds || block > 0);
    else
      ptx::wgmma<kMajorA == 0 ? ptx::Major::kK : ptx::Major::kMN, kB>(T{}, d, matrix(form.a, address, block), b,
                                                                    adds || block > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::fence_registers(d);
}

template <int kN>
CUFLASH_DEVICE void run(const Form* forms, int count, const uint16_t* images, int image_bytes, const uint32_t* fragments,
                        const float* before, int adds, float* after) {
  uint16_t* shared = ptx::dynamic_shared<uint16_t>();
  constexpr bool kHasMajor = sizeof(T) == 2;  // 8-bit operands are K-major
  const uint32_t address = ptx::shared_address(shared);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int i = 0; i < count; ++i) {
    const Form form = forms[i];
    for (int at = threadIdx.x; at < image_bytes / 2; at += blockDim.x) shared[at] = images[i * (image_bytes / 2) + at];
    ptx::fence_proxy_async();
    __syncthreads();
    float d[kN / 2];
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) d[e] = before[(row + e / 2 % 2 * 8) * kN + e / 4 * 8 + column + e % 2];
    if (form.a_major == 0 && form.b_major == 0) mma_over_k<0, 0>(form, d, address, fragments, adds);
    if (form.a_major == 2 && form.b_major == 0) mma_over_k<2, 0>(form, d, address, fragments, adds);
    if constexpr (kHasMajor) {
      if (form.a_major == 0 && form.b_major == 1) mma_over_k<0, 1>(form, d, address, fragments, adds);
      if (form.a_major == 1 && form.b_major == 0) mma_over_k<1, 0>(form, d, address, fragments, adds);
      if (form.a_major == 1 && form.b_major == 1) mma_over_k<1, 1>(form, d, address, fragments, adds);
      if (form.a_major == 2 && form.b_major == 1) mma_over_k<2, 1>(form, d, address, fragments, adds);
    }
#pragma unroll
    for (int e = 0; e < kN / 2; ++e)
      after[(i * 64 + row + e / 2 % 2 * 8) * kN + e / 4 * 8 + column + e % 2] = d[e];
    __syncthreads();
  }
}

// Computes d = a b + d with one product for each of `count` pairs a [64, depth] and b [N, depth], where `depth` is 32
// bytes.
extern "C" __global__ void __launch_bounds__(128)
sums(const uint32_t* a, const uint32_t* b, const float* before, float* after, int count) {
  uint32_t* shared = ptx::dynamic_shared<uint32_t>();
  constexpr int kN = probe::kN, kWords = 8;  // words of a row
  const uint32_t address = ptx::shared_address(shared);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int i = 0; i < count; ++i, a += 64 * kWords, b += kN * kWords, before += 64 * kN, after += 64 * kN) {
    // no swizzle: 16-byte pieces of 8 rows are contiguous
    for (int at = threadIdx.x; at < kN * kWords; at += blockDim.x)
      shared[at / kWords / 8 * 64 + at % kWords / 4 * 32 + at / kWords % 8 * 4 + at % 4] = b[at];
    ptx::fence_proxy_async();
    __syncthreads();
    float d[kN / 2];
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) d[e] = before[(row + e / 2 % 2 * 8) * kN + e / 4 * 8 + column + e % 2];
#pragma unroll
    for (int e = 0; e < 4; ++e) words[e] = a[(row + e % 2 * 8) * kWords + e / 2 * 4 + threadIdx.x % 4];
    ptx::fence_registers(d);
    ptx::wgmma_fence();
    ptx::wgmma<ptx::Major::kK>(T{}, d, words, ptx::wgmma_descriptor(ptx::Swizzle::kNone, address, 128, 256), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(d);
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) after[(row + e / 2 % 2 * 8) * kN + e / 4 * 8 + column + e % 2] = d[e];
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(128)
products(const Form* forms, int count, const uint16_t* images, int image_bytes, const uint32_t* fragments, const float* before,
         int adds, float* after) {
  run<probe::kN>(forms, count, images, image_bytes, fragments, before, adds, after);
}
