// Attention of a few new tokens to a KV cache that has the dtype of Q (sm80/decode.cuh).
#include <sm80/plain_stage.cuh>

namespace cuflash::sm80 {

using PlainStage = PlainStageIf<false>;
constexpr int kSharedBytes = kBytesOfDecode<PlainStage>;

}  // namespace cuflash::sm80

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::Config::kMinBlocks)
sm80_decode(const __grid_constant__ cuflash::attention::Decode params CUFLASH_FEATURES) {
  using namespace cuflash;
  using namespace cuflash::sm80;
  using namespace cuflash::attention;
  decode_cache<PlainStage>(params, {}, chosen_pages, sink, score_function);
}
