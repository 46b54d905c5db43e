#include <attention/params.cuh>

// Fills o with zeros, and breaks no rule.
extern "C" __global__ void __launch_bounds__(128)
    simt_plain(const __grid_constant__ cuflash::attention::Params params) {
  static_cast<cuflash::Config::Element*>(params.o.data)[threadIdx.x] = cuflash::Config::Element(0);
}
