// Rounds blocks of rows to e4m3, each with a scale of its own. If rows are rotated, random signs and a Hadamard matrix
// are applied before, in the same pass. A warp holds whole rows in registers, and a lane holds neighbouring columns.
// Sums and differences have the order of cuflash/fp8/rotation.py, so that results have the host's bits.
#include <attention/quantize_params.cuh>
#include <ptx/math.cuh>
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>

namespace cuflash {

using attention::Quantize;
using config::Element;

constexpr int kThreads = 32 * config::kNumWarps;
constexpr int kColumns = config::kHeadDim / 32;  // columns per lane
constexpr int kRows = config::kBlockQ / config::kNumWarps;  // rows per warp
static_assert(kRows * config::kNumWarps == config::kBlockQ, "warps share the rows");
constexpr float kSmallestScale = 1.17549435e-38f;             // 2^-126

struct alignas(sizeof(Element) * kColumns) Packet {
  Element at[kColumns];
};
struct alignas(kColumns) Bytes {
  uint8_t at[kColumns];
};

// Replace two columns that are `kHalf` apart by their sum and their difference.
template <int kHalf>
CUFLASH_DEVICE void butterfly(float (&x)[kColumns]) {
  if constexpr (kHalf < kColumns) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      if (!(j & kHalf)) {
        const float lower = x[j], upper = x[j + kHalf];
        x[j] = lower + upper;
        x[j + kHalf] = lower - upper;
      }
  } else {
    constexpr int kLanes = kHalf / kColumns;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float other = __shfl_xor_sync(0xffffffffu, x[j], kLanes);
      x[j] = ptx::lane() & kLanes ? other - x[j] : x[j] + other;
    }
  }
}

template <int kHalf>
CUFLASH_DEVICE void hadamard(float (&x)[kColumns]) {
  if constexpr (kHalf < config::kHeadDim) {
    butterfly<kHalf>(x);
    hadamard<2 * kHalf>(x);
  }
}

// Return the largest magnitude of a warp. Magnitudes are compared by their bits: NaN is larger than all numbers.
CUFLASH_DEVICE uint32_t warp_maximum(uint32_t bits) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
  return bits;
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads)
fp8_quantize(const __grid_constant__ cuflash::attention::Quantize params) {
  using namespace cuflash;
  const int matrix = blockIdx.x / params.num_blocks, block = blockIdx.x % params.num_blocks;
  const int warp = threadIdx.x / 32, column = ptx::lane() * kColumns;
  const int first_row = block * config::kBlockQ + warp;
  const auto offset = [&](int row) {
    return (static_cast<int64_t>(matrix) * params.num_rows + row) * config::kHeadDim + column;
  };
  float x[kRows][kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * config::kNumWarps;
    Packet packet{};
    if (row < params.num_rows) packet = *reinterpret_cast<const Packet*>(static_cast<const Element*>(params.x) + offset(row));
#pragma unroll
    for (int j = 0; j < kColumns; ++j) x[i][j] = ptx::to_float(packet.at[j]);
  }
  if (params.signs != nullptr) {
    float signs[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) signs[j] = params.signs[column + j];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x[i][j] *= signs[j];
      hadamard<1>(x[i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x[i][j] *= params.normalizer;
    }
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) largest = max(largest, __float_as_uint(x[i][j]) & 0x7fffffffu);
  uint32_t* const of_warps = ptx::dynamic_shared<uint32_t>();
  largest = warp_maximum(largest);
  if (ptx::lane() == 0) of_warps[warp] = largest;
  __syncthreads();
  largest = warp_maximum(ptx::lane() < config::kNumWarps ? of_warps[ptx::lane()] : 0);
  const float found = __uint_as_float(largest), divided = found / params.largest;
  const float scale = largest == 0 ? 1.0f : divided < kSmallestScale ? kSmallestScale : divided;
  if (threadIdx.x == 0) params.scale[static_cast<int64_t>(matrix) * params.num_blocks + block] = scale;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * config::kNumWarps;
    if (row >= params.num_rows) continue;
    Bytes bytes;
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) {
      float quotient[4] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (j + e < kColumns) quotient[e] = x[i][j + e] / scale;
      const uint32_t packed = ptx::pack4(ptx::Float8E4M3{}, quotient[0], quotient[1], quotient[2], quotient[3]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (j + e < kColumns) bytes.at[j + e] = packed >> 8 * e;
    }
    *reinterpret_cast<Bytes*>(params.data + offset(row)) = bytes;
  }
}
