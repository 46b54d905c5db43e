// Blocks that synchronize: the last one to arrive merges the parts of all, and blocks that take turns.
#include <ptx/atomic.cuh>
#include <ptx/count.cuh>
#include <ptx/shared.cuh>
#include <ptx/thread.cuh>
using namespace cuflash;

enum MergeFault { kSound, kNoFenceBefore, kNoFenceAfter, kNoBarrier, kMergesTooEarly, kResetTooSoon };

// The block that is counted last sets out[i] to the sum of x[block][i] over all blocks, and the count to 0.
template <int kFault>
CUFLASH_DEVICE void merge(const float* x, float* parts, float* out, int* count) {
  int& is_last = *ptx::dynamic_shared<int>();
  const int num_blocks = gridDim.x, mine = blockIdx.x * blockDim.x + threadIdx.x;
  parts[mine] = x[mine];  // a part
  if (kFault != kNoBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (kFault != kNoFenceBefore) __threadfence();
    const int arrived = ptx::fetch_add(count, 1);
    if (kFault != kNoFenceAfter) __threadfence();
    if (kFault == kResetTooSoon && arrived == num_blocks - 2)
      *count = 0;  // resets
    is_last = arrived == num_blocks - (kFault == kMergesTooEarly ? 2 : 1);
  }
  __syncthreads();
  if (!is_last) return;
  float sum = 0;
  for (int block = 0; block < num_blocks; ++block)
    sum += parts[block * blockDim.x + threadIdx.x];  // merges
  out[threadIdx.x] = sum;
  if (threadIdx.x == 0) *count = 0;
}

extern "C" __global__ void merges(const float* x, float* parts, float* out, int* count, int fault) {
  switch (fault) {
    case kSound: return merge<kSound>(x, parts, out, count);
    case kNoFenceBefore: return merge<kNoFenceBefore>(x, parts, out, count);
    case kNoFenceAfter: return merge<kNoFenceAfter>(x, parts, out, count);
    case kNoBarrier: return merge<kNoBarrier>(x, parts, out, count);
    case kMergesTooEarly: return merge<kMergesTooEarly>(x, parts, out, count);
    case kResetTooSoon: return merge<kResetTooSoon>(x, parts, out, count);
  }
}

enum TurnFault { kInTurn, kRelaxed, kWaitsForTooFew, kNoWait, kBackward };

// sum[i] = 2 sum[i] + x[block][i], block after block; with kBackward in reverse order.
extern "C" __global__ void takes_turns(const int* x, int* sum, int* turn, int fault) {
  const int number = blockIdx.x, place = fault == kBackward ? gridDim.x - 1 - number : number;
  if (fault != kNoWait && place > 0)
    ptx::wait_for_counter(turn, ~0, fault == kWaitsForTooFew ? place - 1 : place);  // waits
  sum[threadIdx.x] = 2 * sum[threadIdx.x] + x[number * blockDim.x + threadIdx.x];  // adds
  __syncwarp();
  if (ptx::lane() != 0) return;
  if (fault == kRelaxed) ptx::fetch_add(turn, 1);
  else ptx::red_add_release(turn, 1);
}

// Two blocks, one of which polls a flag without an atomic operation.
extern "C" __global__ void looks(volatile int* flag, int is_sound) {
  if (blockIdx.x == 1) {
    atomicExch(const_cast<int*>(flag), 1);
    return;
  }
  while ((is_sound ? atomicAdd(const_cast<int*>(flag), 0) : *flag) == 0) {}  // looks
}
