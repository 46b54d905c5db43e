#pragma once

// The score function of kernels without one. If a specification has a score function, the text that
// cuflash/compiler/score_text.py prints replaces this file, and `score_function` is an argument of the kernel.
namespace cuflash {

constexpr bool kHasScore = false;

namespace score {
struct Function {
  using Number = config::Accumulator;
  static constexpr bool kIsDerived = false, kAddsGradients = false, kReadsAtPositions = false, kIsShift = false,
                        kSlopesNeedScore = false, kIsStaged = false, kCanBeUniform = false, kStoresGradient = false;
  static constexpr bool kTakesProducts = false, kIsUnscaled = false, kNeedsDistancesAlone = false;
  static constexpr int kNumBins = 0;
};
}  // namespace score

constexpr score::Function score_function{};

}  // namespace cuflash
