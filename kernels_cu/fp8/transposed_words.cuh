#pragma once
#include <ptx/math.cuh>
#include <ptx/thread.cuh>

// The transposition of blocks of e4m3 values in shared memory, with keys in the order in which FP8 kernels hold
// weights: of every 16 keys, thread t of four holds 2t, 2t + 1, 2t + 8 and 2t + 9.
namespace cuflash::fp8 {

// The rows of a block of keys, as 32-bit words in shared memory. The swizzle keeps both the writes of whole rows and
// the reads of whole columns free of bank conflicts.
template <int kKeys, int kColumns>
class KeyRows {
 public:
  static constexpr int kBytes = kKeys * kColumns;
  static constexpr int kWords = kColumns / 4;  // words per row
  static_assert(kKeys % 16 == 0 && kWords % 16 == 0, "whole groups of keys; words within a row are swizzled");

  explicit CUFLASH_DEVICE KeyRows(uint32_t* words) : words_(words) {}

  // Return the address of the words `word` and `word + 1` of a key; `word` must be even.
  CUFLASH_DEVICE uint32_t* pair(int key, int word) const { return &words_[index(key, word)]; }

  // Store the transposed block to rows of `stride` bytes, one for each column. Called by all threads of the block.
  template <int kThreads>
  CUFLASH_DEVICE void store_columns(uint8_t* to, int64_t stride) const {
    constexpr int kHalves = kKeys / 8;  // runs of eight keys that follow each other in a column
    for (int at = threadIdx.x; at < kHalves * kWords; at += kThreads) {
      const int half = at % kHalves, word = at / kHalves;
      const int first_key = half / 2 * 16 + half % 2 * 4;
      uint32_t columns[2][4];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        uint32_t keys[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) keys[e] = words_[index(first_key + 2 * t + e / 2 * 8 + e % 2, word)];
        transpose_bytes(columns[t], keys);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *reinterpret_cast<Run*>(to + (4 * word + c) * stride + 8 * half) = {columns[0][c], columns[1][c]};
    }
  }

 private:
  struct alignas(8) Run {
    uint32_t first, second;
  };

  static CUFLASH_DEVICE int index(int key, int word) {
    const int swizzle = key / 16 * 2 ^ (key / 4 & 1) * 16 ^ (key & 3) * 8;
    return key * kWords + (word ^ (swizzle & (kWords - 1)));
  }

  // Return in word c the byte c of each of four words.
  static CUFLASH_DEVICE void transpose_bytes(uint32_t (&to)[4], const uint32_t (&from)[4]) {
    uint32_t lower[2], upper[2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      lower[pair] = ptx::permute_bytes(from[2 * pair], from[2 * pair + 1], 0x5140);
      upper[pair] = ptx::permute_bytes(from[2 * pair], from[2 * pair + 1], 0x7362);
    }
    to[0] = ptx::permute_bytes(lower[0], lower[1], 0x5410);
    to[1] = ptx::permute_bytes(lower[0], lower[1], 0x7632);
    to[2] = ptx::permute_bytes(upper[0], upper[1], 0x5410);
    to[3] = ptx::permute_bytes(upper[0], upper[1], 0x7632);
  }

  uint32_t* words_;
};

}  // namespace cuflash::fp8
