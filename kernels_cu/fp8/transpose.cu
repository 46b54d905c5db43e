// Transposes values in e4m3 that were not transposed as they were rounded. Keys past the last one are zeros. A thread
// block transposes 128 keys of a matrix.
#include <attention/quantize_params.cuh>
#include <fp8/transposed_words.cuh>
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>

namespace cuflash::fp8 {

using attention::Transpose;

constexpr int kThreads = 32 * Config::kNumWarps;
constexpr int kKeys = Config::kBlockKv;
using Rows = KeyRows<kKeys, Config::kHeadDim>;

struct alignas(8) Words {
  uint32_t at[2];
};

}  // namespace cuflash::fp8

extern "C" __global__ void __launch_bounds__(cuflash::fp8::kThreads)
fp8_transpose(const __grid_constant__ cuflash::attention::Transpose params) {
  using namespace cuflash;
  using namespace cuflash::fp8;
  const int num_blocks = params.padded_rows / kKeys;
  const int matrix = blockIdx.x / num_blocks, first_key = blockIdx.x % num_blocks * kKeys;
  const Rows rows(ptx::dynamic_shared<uint32_t>());
  for (int at = threadIdx.x; at < kKeys * Rows::kWords / 2; at += kThreads) {
    const int key = at / (Rows::kWords / 2), word = at % (Rows::kWords / 2) * 2;
    const int64_t row = static_cast<int64_t>(matrix) * params.num_rows + first_key + key;
    Words words{};
    if (first_key + key < params.num_rows)
      words = *reinterpret_cast<const Words*>(params.data + row * Config::kHeadDim + 4 * word);
    *reinterpret_cast<Words*>(rows.pair(key, word)) = words;
  }
  __syncthreads();
  rows.store_columns<kThreads>(
      params.transposed + static_cast<int64_t>(matrix) * Config::kHeadDim * params.padded_rows + first_key,
      params.padded_rows);
}
