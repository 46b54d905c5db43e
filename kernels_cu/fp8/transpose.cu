// Transposes values in e4m3 and puts their keys into the order in which FP8 kernels hold weights: of every 16 keys,
// thread t of four holds 2t, 2t + 1, 2t + 8 and 2t + 9. Keys past the last one are zeros. A thread block transposes 128
// keys of a matrix.
#include <attention/quantize_params.cuh>
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>

namespace cuflash::fp8 {

using attention::Transpose;

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kKeys = Config::kBlockKv, kGroups = kKeys / 16;
constexpr int kWords = Config::kHeadDim / 4;  // 32-bit words per row
static_assert(kGroups == 8 && kWords % 4 == 0, "eight groups of keys and four words of a row are a warp's");

// Return the index of a word of a key's row in shared memory. Rows of different groups are in different banks.
CUFLASH_DEVICE int word_index(int key, int word) {
  constexpr int kSwizzled = kWords % 32 == 0 ? 8 : kWords % 16 == 0 ? 4 : kWords % 8 == 0 ? 2 : 1;
  return key * kWords + (word ^ key / 16 % kSwizzled * 4);
}

// The bytes of 16 keys in one column.
struct alignas(16) Words {
  uint32_t at[4];
};

// Return a word that consists of byte c of each of four words.
CUFLASH_DEVICE uint32_t bytes_of(const uint32_t (&words)[4], int c) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) found |= (words[i] >> 8 * c & 0xff) << 8 * i;
  return found;
}

}  // namespace cuflash::fp8

extern "C" __global__ void __launch_bounds__(cuflash::fp8::kThreads)
fp8_transpose(const __grid_constant__ cuflash::attention::Transpose params) {
  using namespace cuflash;
  using namespace cuflash::fp8;
  const int num_blocks = params.padded_rows / kKeys;
  const int matrix = blockIdx.x / num_blocks, first_key = blockIdx.x % num_blocks * kKeys;
  uint32_t* const rows = ptx::dynamic_shared<uint32_t>();
  for (int at = threadIdx.x; at < kKeys * kWords; at += kThreads) {
    const int key = at / kWords, word = at % kWords;
    const int64_t row = static_cast<int64_t>(matrix) * params.num_rows + first_key + key;
    const bool in_bounds = first_key + key < params.num_rows;
    rows[word_index(key, word)] = in_bounds ? reinterpret_cast<const uint32_t*>(params.data)[row * kWords + word] : 0;
  }
  __syncthreads();
  for (int at = threadIdx.x; at < kGroups * kWords; at += kThreads) {
    const int group = at / 4 % kGroups, word = at / (4 * kGroups) * 4 + at % 4;
    Words columns[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t keys[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) keys[e] = rows[word_index(16 * group + 2 * t + e / 2 * 8 + e % 2, word)];
#pragma unroll
      for (int c = 0; c < 4; ++c) columns[c].at[t] = bytes_of(keys, c);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t column = static_cast<int64_t>(matrix) * Config::kHeadDim + 4 * word + c;
      *reinterpret_cast<Words*>(params.transposed + column * params.padded_rows + first_key + 16 * group) = columns[c];
    }
  }
}
