#include <ptx/barrier.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;

extern "C" __global__ void copy(const unsigned char* from, unsigned char* to, const int* sizes, int* handed) {
  unsigned char* shared = ptx::dynamic_shared<unsigned char>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp == 0) {
    const uint32_t row = ptx::shared_address(shared + 64 * lane);
    const int size = sizes[lane];
    ptx::cp_async_ca_4(row, from + 64 * lane, size % 5);
    ptx::cp_async_commit();
    ptx::cp_async_ca_8(row + 8, from + 64 * lane + 8, size % 9);
    ptx::cp_async_ca_16(row + 16, from + 64 * lane + 16, size);
    ptx::cp_async_commit();
    ptx::cp_async_cg_16(row + 32, from + 64 * lane + 32, size);
    ptx::cp_async_wait<1>();
    for (int i = 0; i < 4; ++i) to[64 * lane + i] = shared[64 * lane + i];
    ptx::cp_async_wait<0>();
    for (int i = 8; i < 32; ++i) to[64 * lane + i] = shared[64 * lane + i];
    ptx::cp_async_wait_all();
    for (int i = 32; i < 48; ++i) to[64 * lane + i] = shared[64 * lane + i];
  }
  // Warp 1 passes data to warp 2 and continues without waiting for it; warps 0 and 3 do not participate.
  int* letter = reinterpret_cast<int*>(shared + 2048);
  if (warp == 1) {
    letter[lane] = 3 * lane;
    ptx::bar_arrive(1, 64);
    ptx::bar_sync(2, 64);
    letter[lane] = -1;
  } else if (warp == 2) {
    ptx::bar_sync(1, 64);
    handed[lane] = letter[31 - lane];
    ptx::bar_arrive(2, 64);
  }
}
