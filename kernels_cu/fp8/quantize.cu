// Rounds blocks of rows to e4m3, each with its own scale. If rows are rotated, random signs and a Hadamard matrix are
// applied first; if the array holds values, its transpose is written as well: all in one pass over memory. A lane holds
// a quarter of a row in registers: chunks of eight neighboring columns that are 32 columns apart. Thus loads and stores
// fill whole sectors, and only two stages of the Hadamard matrix need other lanes. Sums and differences are computed
// in the order of cuflash/fp8/rotation.py, so that results equal the host's bit for bit.
#include <attention/quantize_params.cuh>
#include <fp8/transposed_words.cuh>
#include <ptx/math.cuh>
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>

namespace cuflash::fp8 {

using attention::Quantize;
using attention::QuantizedArray;
using Element = Config::Element;

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kLanesOfRow = 4, kRowsOfWarp = 32 / kLanesOfRow;
constexpr int kChunk = 8, kChunkStride = kChunk * kLanesOfRow;  // columns per chunk, and from chunk to chunk of a lane
constexpr int kColumns = Config::kHeadDim / kLanesOfRow;  // columns per lane
constexpr int kRowStride = Config::kNumWarps * kRowsOfWarp;  // from row to row of a lane
constexpr int kRows = Config::kBlockQ / kRowStride;  // rows per lane
static_assert(kRows * kRowStride == Config::kBlockQ, "warps share the rows");
constexpr float kSmallestScale = 0x1p-126f, kLargestScale = 0x1.fffffep127f;  // the range of normal floats
constexpr float kLargeUnits = 256.0f;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kLeastDivisor = 0x1p-60f, kMostDivisor = 0x1p60f;  // range of a `Divisor`
using Values = KeyRows<Config::kBlockQ, Config::kHeadDim>;

// Types that a lane loads or stores at once: a Packet has the elements of a chunk, Signs those of four columns, and
// Words the bytes of a chunk.
struct alignas(sizeof(Element) * kChunk) Packet {
  uint32_t words[sizeof(Element) * kChunk / 4];
};
struct alignas(16) Signs {
  float at[4];
};
struct alignas(kChunk) Words {
  uint32_t at[kChunk / 4];
};

// Return number e of a packet.
template <class T>
CUFLASH_DEVICE float number_of(const Packet& packet, int e) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(packet.words[e]);
  else return ptx::to_float(T{static_cast<unsigned short>(packet.words[e / 2] >> 16 * (e % 2))});
}

// Return column j of a lane, whose first column is `first`.
CUFLASH_DEVICE constexpr int column_of(int first, int j) { return first + j / kChunk * kChunkStride + j % kChunk; }

// Replace every two columns that are `kHalf` apart by their sum and their difference.
template <int kHalf>
CUFLASH_DEVICE void butterfly(float (&x)[kColumns]) {
  if constexpr (kHalf < kChunk || kHalf >= kChunkStride) {
    constexpr int kStep = kHalf < kChunk ? kHalf : kHalf / kLanesOfRow;
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

// Apply the signs, the Hadamard matrix and its normalizer to the rows of a lane. The first stage takes its sums and
// differences as it applies the signs, whose products are exact.
CUFLASH_DEVICE void rotate(float (&x)[kRows][kColumns], const float* signs, int column, float normalizer) {
#pragma unroll
  for (int j = 0; j < kColumns; j += 4) {
    const Signs four = *reinterpret_cast<const Signs*>(signs + column_of(column, j));
#pragma unroll
    for (int e = 0; e < 4; e += 2)
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float lower = x[i][j + e] * four.at[e], upper = x[i][j + e + 1], sign = four.at[e + 1];
        x[i][j + e] = ptx::fma(upper, sign, lower);
        x[i][j + e + 1] = ptx::fma(upper, -sign, lower);
      }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    hadamard<2>(x[i]);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) x[i][j] *= normalizer;
  }
}

// Divide the rows of a lane by the large units.
CUFLASH_DEVICE void to_large_units(float (&x)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) x[i][j] *= 1 / kLargeUnits;
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
  float of_lane = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) of_lane = ptx::larger_magnitude(of_lane, x[i][j]);
  const uint32_t largest = warp_maximum(__float_as_uint(of_lane));
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
    const float near = x * reciprocal_, excess = ptx::fma(near, divisor_, -x);
    return ptx::fma(-excess, reciprocal_, near);  // -0 stays -0, since an excess of 0 is positive
  }

 private:
  float divisor_, reciprocal_;
};

// The rows of one block that a lane holds.
struct LaneRows {
  const QuantizedArray& array;
  int matrix, first_row, key, column;  // the lane's first row in the matrix and in the block, and its first column

  CUFLASH_DEVICE bool in_bounds(int i) const { return first_row + i * kRowStride < array.num_rows; }

  // Return the position of the first column of row i in an array of all matrices.
  CUFLASH_DEVICE int64_t offset(int i) const {
    const int64_t row = static_cast<int64_t>(matrix) * array.num_rows + first_row + i * kRowStride;
    return row * Config::kHeadDim + column;
  }

  // Rows past the last one are zeros.
  CUFLASH_DEVICE void load(float (&x)[kRows][kColumns]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; j += kChunk) {
        Packet packet{};
        const Element* const from = static_cast<const Element*>(array.x) + offset(i) + column_of(0, j);
        if (in_bounds(i)) packet = *reinterpret_cast<const Packet*>(from);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) x[i][j + e] = number_of<Element>(packet, e);
      }
  }

  // Round the rows and store them, also to shared memory if they are to be transposed. `divided` divides a number by
  // the scale.
  template <class Divided>
  CUFLASH_DEVICE void store(const float (&x)[kRows][kColumns], Values values, Divided divided) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; j += kChunk) {
        Words words{};
        if (in_bounds(i)) {
#pragma unroll
          for (int w = 0; w < kChunk / 4; ++w) {
            const float* const from = &x[i][j + 4 * w];
            words.at[w] = ptx::pack4(ptx::Float8E4M3{}, divided(from[0]), divided(from[1]), divided(from[2]),
                                     divided(from[3]));
          }
          *reinterpret_cast<Words*>(array.data + offset(i) + column_of(0, j)) = words;
        }
        if (array.transposed != nullptr)
          *reinterpret_cast<Words*>(values.pair(key + i * kRowStride, column_of(column, j) / 4)) = words;
      }
  }
};

}  // namespace cuflash::fp8

extern "C" __global__ void __launch_bounds__(cuflash::fp8::kThreads, cuflash::Config::kMinBlocks)
fp8_quantize(const __grid_constant__ cuflash::attention::Quantize params) {
  using namespace cuflash;
  using namespace cuflash::fp8;
  int number = 0;  // the array of this thread block
  while (static_cast<int>(blockIdx.x) >= params.arrays[number].end_block) ++number;
  const QuantizedArray& array = params.arrays[number];
  const int at = blockIdx.x - (number > 0 ? params.arrays[number - 1].end_block : 0);
  const int matrix = at / array.num_blocks, block = at % array.num_blocks;
  const int key = threadIdx.x / 32 * kRowsOfWarp + ptx::lane() / kLanesOfRow;
  const int column = ptx::lane() % kLanesOfRow * kChunk;
  const LaneRows rows{array, matrix, block * Config::kBlockQ + key, key, column};
  const Values values(ptx::dynamic_shared<uint32_t>());
  uint32_t* const of_warps = ptx::dynamic_shared<uint32_t>() + Values::kBytes / 4;

  float x[kRows][kColumns];
  float units = 1.0f;  // divisor of the numbers: larger than 1 if rotated numbers overflow
  uint32_t largest;
  while (true) {
    rows.load(x);
    if (units > 1) to_large_units(x);
    if (array.signs != nullptr) rotate(x, array.signs, column, params.normalizer);
    largest = block_maximum(x, of_warps);
    if (array.signs == nullptr || largest < kInfinity || units > 1) break;
    units = kLargeUnits;
    __syncthreads();
  }
  const float found = __uint_as_float(largest), divided = found / params.largest, most = kLargestScale / units;
  const bool is_too_large = divided > most && largest < kInfinity;
  const float scale = largest == 0 ? 1.0f : divided < kSmallestScale ? kSmallestScale : is_too_large ? most : divided;
  if (threadIdx.x == 0 && block < array.num_scales)
    array.scale[static_cast<int64_t>(matrix) * array.num_scales + block] = scale * units;
  if (scale >= kLeastDivisor && scale <= kMostDivisor) {  // false for NaN
    const Divisor divisor(scale);
    rows.store(x, values, [&](float number) { return divisor.quotient(number); });
  } else {
    rows.store(x, values, [&](float number) { return number / scale; });
  }
  if (array.transposed == nullptr) return;
  __syncthreads();
  const int64_t padded_rows = static_cast<int64_t>(array.num_blocks) * Config::kBlockQ;
  values.store_columns<kThreads>(
      array.transposed + matrix * Config::kHeadDim * padded_rows + block * Config::kBlockQ, padded_rows);
}
