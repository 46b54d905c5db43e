#pragma once

// The placeholder for kernels without a score function. If a specification has a score function, the text that
// cuflash/compiler/score_text.py prints replaces this file, and `score_function` is an argument of the kernel.
namespace cuflash {

constexpr bool kHasScore = false;

namespace score {
struct Function {
  using Number = Config::Accumulator;  // type in which the function computes
  static constexpr bool kIsDerived = false;  // has derivatives, for backward passes
  static constexpr bool kAddsGradients = false;  // adds to the gradients of captured arrays
  static constexpr bool kReadsAtPositions = false;  // reads captured arrays at query or key positions
  static constexpr bool kNeedsDistancesAlone = false;  // uses positions only in differences
  static constexpr bool kIsShift = false;  // its derivative with respect to the score is 1
  static constexpr bool kSlopesNeedScore = false;  // its derivatives depend on the score
  static constexpr bool kIsStaged = false;  // reads an array that is staged in shared memory
  static constexpr bool kStoresGradient = false;  // kernels store the gradient of that array themselves
  static constexpr bool kCanBeUniform = false;  // all scores of a tile may read the same elements of captured arrays
  static constexpr bool kSumsByDistance = false;  // scores at the same distance add to one element of a gradient
  static constexpr bool kTakesProducts = false;  // takes q k^T, which is not multiplied by the softmax scale
  static constexpr bool kIsUnscaled = false;  // leaves the softmax scale to the exponent
  static constexpr int kNumBins = 0;  // elements of a short table whose gradient each thread sums in bins
};
}  // namespace score

constexpr score::Function score_function{};

}  // namespace cuflash
