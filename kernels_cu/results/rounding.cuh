#pragma once
#include <ptx/math.cuh>
#include <tile/element.cuh>

namespace cuflash::results {

// Round a number to an element's type. Rounding to bfloat16 uses integer arithmetic, since chips before sm_80 have no
// instruction for it.
template <class Accumulator, class Element>
CUFLASH_DEVICE void round_to(Accumulator x, Element& to) { tile::to_element(x, to); }
CUFLASH_DEVICE void round_to(float x, ptx::BFloat16& to) { to = ptx::bfloat16_by_integers(x); }

}  // namespace cuflash::results
