#pragma once
#include <attention/params.cuh>

// The tangents of a call's arrays, for kernels that differentiate a pass in the direction of these tangents.
namespace cuflash::attention {

// A kernel argument. Arrays without a tangent are null, and kernels do not read them: the constants kHas... of Config
// say which tangents exist. o_dot and lse_dot are results.
struct Tangents {
  Matrices q_dot, k_dot, v_dot, o_dot, lse_dot;
  Matrices sink_dot;  // one number per head, of the sink's dtype
  // In passes that differentiate gradients, o_dot and lse_dot are inputs; delta and its tangent are workspaces.
  Matrices do_dot, dlse_dot, delta, delta_dot;
};

// True if scores, or arrays that the score function reads, have tangents.
constexpr bool kMovesScores = Config::kHasQDot || Config::kHasKDot || Config::kHasScoreDot;

}  // namespace cuflash::attention
