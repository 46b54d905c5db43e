#include <attention/params.cuh>

extern "C" __global__ void simt_broken(const __grid_constant__ cuflash::attention::Params params) {
  return params.no_such_member;  // line 4
}
