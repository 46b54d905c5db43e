// Rounds blocks of rows to e4m3, each with its own scale. If rows are rotated, random signs and a Hadamard matrix are
// applied first, in the same pass. A lane holds 16 columns of a row in registers: two chunks of eight neighboring
// columns that are half a row apart. Thus loads read whole cache lines, and four stages of the Hadamard matrix need no
// other lane. Sums and differences are computed in the order of cuflash/fp8/rotation.py, so that results equal the
// host's bit for bit.
#include <attention/quantize_params.cuh>
#include <ptx/math.cuh>
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>

namespace cuflash::fp8 {

using attention::Quantize;
using Element = Config::Element;

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kChunk = 8, kColumns = 2 * kChunk;  // columns per chunk and per lane
constexpr int kChunkStride = Config::kHeadDim / 2;  // distance in columns between a lane's chunks
constexpr int kLanesOfRow = Config::kHeadDim / kColumns, kRowsOfWarp = 32 / kLanesOfRow;
constexpr int kRows = Config::kBlockQ / (Config::kNumWarps * kRowsOfWarp);  // rows per lane
static_assert(kRows * Config::kNumWarps * kRowsOfWarp == Config::kBlockQ, "warps share the rows");
constexpr float kSmallestScale = 0x1p-126f, kLargestScale = 0x1.fffffep127f;  // the range of normal floats
constexpr float kLargeUnits = 256.0f;
constexpr uint32_t kLarge = (127u + 119u) << 23;  // bits of 2^119; the sum of 256 such numbers overflows
constexpr float kLeastDivisor = 0x1p-60f, kMostDivisor = 0x1p60f;  // range of a `Divisor`

// Types that a lane loads or stores at once: a Packet has the elements of a chunk, Signs those of four columns, and
// Words the bytes of a chunk.
struct alignas(sizeof(Element) * kChunk) Packet {
  Element at[kChunk];
};
struct alignas(16) Signs {
  float at[4];
};
struct alignas(kChunk) Words {
  uint32_t at[kChunk / 4];
};

// Replace every two columns that are `kHalf` apart by their sum and their difference.
template <int kHalf>
CUFLASH_DEVICE void butterfly(float (&x)[kColumns]) {
  if constexpr (kHalf < kChunk || kHalf == kChunkStride) {
    constexpr int kStep = kHalf < kChunk ? kHalf : kChunk;
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      if (!(j & kStep)) {
        const float lower = x[j], upper = x[j + kStep];
        x[j] = lower + upper;
        x[j + kStep] = lower - upper;
      }
  } else {
    constexpr int kLanes = kHalf / kChunk;
    const float sign = ptx::lane() & kLanes ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float other = __shfl_xor_sync(0xffffffffu, x[j], kLanes);
      x[j] = ptx::fma(x[j], sign, other);  // rounded once, like a sum or a difference
    }
  }
}

// Multiply a row by the Hadamard matrix, without its normalizer: stages `kHalf` and greater.
template <int kHalf>
CUFLASH_DEVICE void hadamard(float (&x)[kColumns]) {
  if constexpr (kHalf < Config::kHeadDim) {
    butterfly<kHalf>(x);
    hadamard<2 * kHalf>(x);
  }
}

// Return the largest magnitude in a warp. Magnitudes are compared by their bits, according to which NaN is larger than
// all numbers.
CUFLASH_DEVICE uint32_t warp_maximum(uint32_t bits) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
  return bits;
}

// Return the bits of the largest magnitude in a block. `of_warps` may be used again after a barrier.
CUFLASH_DEVICE uint32_t block_maximum(const float (&x)[kRows][kColumns], uint32_t* of_warps) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) largest = max(largest, __float_as_uint(x[i][j]) & 0x7fffffffu);
  largest = warp_maximum(largest);
  if (ptx::lane() == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  return warp_maximum(ptx::lane() < Config::kNumWarps ? of_warps[ptx::lane()] : 0);
}

// A divisor whose quotients take three operations each. A quotient rounds to the same e4m3 number as the correctly
// rounded float; test_numbers_beside_ties_fall_to_the_side_of_the_host checks all possible exceptions. Divisors are
// between 2^-60 and 2^60, so that any quotient that does not round to 0 has a normal remainder.
class Divisor {
 public:
  explicit CUFLASH_DEVICE Divisor(float divisor) : divisor_(divisor), reciprocal_(1.0f / divisor) {}

  CUFLASH_DEVICE float quotient(float x) const {
    const float near = x * reciprocal_, remainder = ptx::fma(-near, divisor_, x);
    return ptx::fma(remainder, reciprocal_, near);
  }

 private:
  float divisor_, reciprocal_;
};

// Round the rows of a lane and store them. `divided` divides a number by the scale.
template <class Divided>
CUFLASH_DEVICE void store_rows(const Quantize& params, const float (&x)[kRows][kColumns], int matrix, int first_row,
                               int column, Divided divided) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * Config::kNumWarps * kRowsOfWarp;
    if (row >= params.num_rows) continue;
    uint8_t* const data =
        params.data + (static_cast<int64_t>(matrix) * params.num_rows + row) * Config::kHeadDim + column;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      Words words;
#pragma unroll
      for (int w = 0; w < kChunk / 4; ++w) {
        const float* const from = &x[i][chunk * kChunk + 4 * w];
        words.at[w] = ptx::pack4(ptx::Float8E4M3{}, divided(from[0]), divided(from[1]), divided(from[2]),
                                 divided(from[3]));
      }
      *reinterpret_cast<Words*>(data + chunk * kChunkStride) = words;
    }
  }
}

}  // namespace cuflash::fp8

extern "C" __global__ void __launch_bounds__(cuflash::fp8::kThreads)
fp8_quantize(const __grid_constant__ cuflash::attention::Quantize params) {
  using namespace cuflash;
  using namespace cuflash::fp8;
  const int matrix = blockIdx.x / params.num_blocks, block = blockIdx.x % params.num_blocks;
  const int warp = threadIdx.x / 32, column = ptx::lane() % kLanesOfRow * kChunk;
  const int first_row = block * Config::kBlockQ + warp * kRowsOfWarp + ptx::lane() / kLanesOfRow;
  float x[kRows][kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * Config::kNumWarps * kRowsOfWarp;
    const int64_t offset = (static_cast<int64_t>(matrix) * params.num_rows + row) * Config::kHeadDim + column;
    const Element* const from = static_cast<const Element*>(params.x) + offset;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      Packet packet{};
      if (row < params.num_rows) packet = *reinterpret_cast<const Packet*>(from + chunk * kChunkStride);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) x[i][chunk * kChunk + j] = ptx::to_float(packet.at[j]);
    }
  }
  uint32_t* const of_warps = ptx::dynamic_shared<uint32_t>();
  float units = 1.0f;  // factor of the numbers: larger than 1 if rotated numbers may overflow
  if (params.signs != nullptr) {
    if (block_maximum(x, of_warps) >= kLarge) units = kLargeUnits;
    __syncthreads();
    float signs[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) {
      const int first = column + j / kChunk * kChunkStride + j % kChunk;
      const Signs four = *reinterpret_cast<const Signs*>(params.signs + first);
#pragma unroll
      for (int e = 0; e < 4; ++e) signs[j + e] = four.at[e] / units;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x[i][j] *= signs[j];
      hadamard<1>(x[i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x[i][j] *= params.normalizer;
    }
  }
  const uint32_t largest = block_maximum(x, of_warps);
  const float found = __uint_as_float(largest), divided = found / params.largest, most = kLargestScale / units;
  const bool is_too_large = divided > most && largest < 0x7f800000u;
  const float scale = largest == 0 ? 1.0f : divided < kSmallestScale ? kSmallestScale : is_too_large ? most : divided;
  if (threadIdx.x == 0) params.scale[static_cast<int64_t>(matrix) * params.num_blocks + block] = scale * units;
  if (scale >= kLeastDivisor && scale <= kMostDivisor) {  // false for NaN
    const Divisor divisor(scale);
    store_rows(params, x, matrix, first_row, column, [&](float number) { return divisor.quotient(number); });
  } else {
    store_rows(params, x, matrix, first_row, column, [&](float number) { return number / scale; });
  }
}
