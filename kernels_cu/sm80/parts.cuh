#pragma once
#include <attention/params.cuh>

// Partial results of thread blocks that share the keys of a tile (split-KV).
namespace cuflash::sm80 {

// O and lse of each part, in float32. The rows of each part follow those of the previous part.
// cuflash/planning/families/sm80.py has the same record.
struct Parts {
  attention::Matrices o_parts;  // [splits * seqlen_q, room for value_dim]
  attention::Matrices lse_parts;  // [splits * seqlen_q]
};

struct NoParts {};  // kernels whose blocks share no tile
constexpr NoParts parts{};

}  // namespace cuflash::sm80
