"""Small kernels for the simulator's tests, and how to build them; child processes under a sanitizer import them too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cuflash import sim
from cuflash.compiler.source import flatten_text
from cuflash.executors.tensor_map import BoxedArray, simulated

PTX = Path(sim.__file__).parent / "ptx"


def build(text: str, entry: str, sanitize: sim.Sanitizer = "") -> sim.Kernel:
    return sim.build(flatten_text(text, f"{entry}.cu", host=True), entry, sanitize=sanitize)


def line_of(text: str, marker: str) -> int:
    """Return the number of the only line that ends with a marker."""
    (number,) = [i for i, line in enumerate(text.split("\n"), start=1) if line.endswith(marker)]
    return number


# A pipeline with two stages: each thread copies 16 bytes of a tile, and reads what another warp copied. Each fault
# changes one line.
PIPELINE = """#include <ptx/types.cuh>
#include <ptx/shared.cuh>
#include <ptx/cp_async.cuh>
using namespace cuflash;

struct Params {
  const float* in;
  float* out;
  int tiles, fault;
};
enum Fault {
  kNone, kNoBarrierBeforeReading, kNoBarrierAfterReading, kWaitTooFew, kNoLastCommit, kStorePastTheEnd, kEndless
};
constexpr int kThreads = 96, kTile = 4 * kThreads;

template <int kFault>
CUFLASH_DEVICE void load(const Params& params, float* stages, int tile) {
  const uint32_t to = ptx::shared_address(stages + tile % 2 * kTile + 4 * threadIdx.x);
  const float* from = params.in + (blockIdx.x * params.tiles + tile) * kTile + 4 * threadIdx.x;
  if (tile < params.tiles)
    ptx::cp_async_cg_16(to, from, 16);  // copies
  if (tile < params.tiles || kFault != kNoLastCommit) ptx::cp_async_commit();
}

template <int kFault>
CUFLASH_DEVICE void run(const Params& params) {
  float* stages = ptx::dynamic_shared<float>();
  float sum = 0.0f;
  load<kFault>(params, stages, 0);
  for (int tile = 0; tile < params.tiles; ++tile) {
    load<kFault>(params, stages, tile + 1);
    if (kFault == kWaitTooFew) ptx::cp_async_wait<2>();
    else ptx::cp_async_wait<1>();
    if (kFault != kNoBarrierBeforeReading) __syncthreads();
    const float* part = stages + tile % 2 * kTile + 4 * ((threadIdx.x + 32) % kThreads);
    for (int i = 0; i < 4; ++i)
      sum += static_cast<float>(i + 1) * part[i];  // reads
    if (kFault != kNoBarrierAfterReading) __syncthreads();
  }
  ptx::cp_async_wait<0>();
  params.out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// Each fault is code of its own: a race between the same two instructions is reported once.
extern "C" __global__ void __launch_bounds__(kThreads) pipeline(const Params params) {
  switch (params.fault) {
    case kNone: return run<kNone>(params);
    case kNoBarrierBeforeReading: return run<kNoBarrierBeforeReading>(params);
    case kNoBarrierAfterReading: return run<kNoBarrierAfterReading>(params);
    case kWaitTooFew: return run<kWaitTooFew>(params);
    case kNoLastCommit: return run<kNoLastCommit>(params);
    case kStorePastTheEnd:
      params.out[gridDim.x * kThreads + threadIdx.x] = 1.0f;  // past the end
      return;
    case kEndless:
      __syncwarp();  // before
      for (volatile float* out = params.out;;) *out = 1.0f;
  }
}
"""
PIPELINE_FAULTS = ("no_barrier_before_reading", "no_barrier_after_reading", "wait_too_few", "no_last_commit")
STORE_PAST_THE_END, ENDLESS = 5, 6
PIPELINE_PARAMS = np.dtype([("in", "u8"), ("out", "u8"), ("tiles", "i4"), ("fault", "i4")], align=True)


def run_pipeline(
    kernel: sim.Kernel, schedule: sim.Schedule, fault: int = 0, short: int = 0, time_limit: float = 60.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pipeline's result and the expected one; the last `short` elements of its input are missing."""
    blocks, tiles = 2, 3
    data = np.arange(blocks * tiles * 384, dtype=np.float32) % 37
    own = data[: data.size - short].copy()
    out = np.full((blocks, 96), np.nan, np.float32)
    params = np.array((own.ctypes.data, out.ctypes.data, tiles, fault), PIPELINE_PARAMS)[()]
    kernel(blocks, 96, (params,), 2 * 384 * 4, schedule, time_limit=time_limit)
    expected = (data.reshape(blocks, tiles, 96, 4) @ np.arange(1, 5, dtype=np.float32)).sum(1)
    return out, np.roll(expected, -32, axis=1)


# A pipeline for sm90: one warpgroup copies tiles of a and b ahead, and another multiplies them and copies the sum out.
HOPPER_PIPELINE = """#include <ptx/barrier.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/shared.cuh>
#include <ptx/tma.cuh>
#include <ptx/warpgroup.cuh>
#include <ptx/wgmma.cuh>
using namespace cuflash;

enum Fault {
  kNone, kReleasedBeforeTheProduct, kReleasedByOneWarp, kNoProductWait, kNoFullWait, kWrongParity, kTooFewBytes,
  kTooManyBytes, kNoBarrierAfterInit, kNoInitFence, kNoWgmmaFence, kNoProxyFence, kNoStoreWait, kThreeWarps
};
constexpr int kSlots = 2, kTile = 64 * 64 * 2;

template <int kFault>
CUFLASH_DEVICE void run(const ptx::TensorMap* a, const ptx::TensorMap* b, const ptx::TensorMap* sum, int tiles) {
  float* sum_tile = ptx::dynamic_shared<float>();
  const uint32_t sum_address = ptx::shared_address(sum_tile), ring = sum_address + 2 * kTile;
  const uint32_t full = ring + 2 * kSlots * kTile, empty = full + 8 * kSlots;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(full + 8 * slot, 1);  // makes
      ptx::mbarrier_init(empty + 8 * slot, kFault == kReleasedByOneWarp ? 1 : 4);
    }
    if (kFault != kNoInitFence) ptx::fence_mbarrier_init();
  }
  if (kFault != kNoBarrierAfterInit) __syncthreads();
  if (warp < 4) {
    ptx::setmaxnreg_dec<24>();
    if (warp > 0 || !ptx::elect_one()) return;
    for (int tile = 0; tile < tiles; ++tile) {
      const int slot = tile % kSlots, turn = tile / kSlots % 2;
      const uint32_t to = ring + 2 * slot * kTile;
      ptx::mbarrier_wait(empty + 8 * slot, kFault == kWrongParity ? turn : turn ^ 1);  // waits for a slot
      constexpr int kBytes = kFault == kTooFewBytes ? kTile : kFault == kTooManyBytes ? 3 * kTile : 2 * kTile;
      ptx::mbarrier_arrive_expect_tx(full + 8 * slot, kBytes);
      ptx::tma_load_4d(to, a, full + 8 * slot, 64 * tile, 0, 0, 0);
      ptx::tma_load_4d(to + kTile, b, full + 8 * slot, 64 * tile, 0, 0, 0);  // copies
    }
    return;
  }
  ptx::setmaxnreg_inc<160>();
  float d[32];
  for (int tile = 0; tile < tiles; ++tile) {
    const int slot = tile % kSlots, turn = tile / kSlots % 2;
    const uint32_t from = ring + 2 * slot * kTile;
    if (kFault != kNoFullWait) ptx::mbarrier_wait(full + 8 * slot, turn);  // waits for tiles
    const auto release = [&] {
      if (lane == 0 && (kFault != kReleasedByOneWarp || warp == 4)) ptx::mbarrier_arrive(empty + 8 * slot);
    };
    if (kFault == kReleasedBeforeTheProduct) release();
    if (kFault != kNoWgmmaFence) ptx::wgmma_fence();
    if (kFault != kThreeWarps || warp != 5)
      for (int block = 0; block < 4; ++block) {
        const uint64_t a_part = ptx::wgmma_descriptor(ptx::Swizzle::k128, from + 32 * block, 0, 1024);
        const uint64_t b_part = ptx::wgmma_descriptor(ptx::Swizzle::k128, from + kTile + 32 * block, 0, 1024);
        const bool adds = tile > 0 || block > 0;
        ptx::wgmma<ptx::Major::kK, ptx::Major::kK>(ptx::Half{}, d, a_part, b_part, adds);  // multiplies
      }
    ptx::wgmma_commit();
    if (kFault != kNoProductWait) ptx::wgmma_wait<0>();
    if (kFault != kReleasedBeforeTheProduct) release();
  }
  if (kFault == kNoProductWait) ptx::wgmma_wait<0>();
  for (int e = 0; e < 32; ++e) {
    const int row = warp % 4 * 16 + lane / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
    sum_tile[row * 64 + column] = d[e];
  }
  if (kFault != kNoProxyFence) ptx::fence_proxy_async();
  ptx::bar_sync(1, 128);
  if (threadIdx.x == 128) {
    ptx::tma_store_4d(sum, sum_address, 0, 0, 0, 0);  // copies out
    ptx::bulk_commit();
    if (kFault != kNoStoreWait) ptx::bulk_wait_read<0>();
  }
}

extern "C" __global__ void __launch_bounds__(256, 1)
hopper_pipeline(const __grid_constant__ ptx::TensorMap a, const __grid_constant__ ptx::TensorMap b,
                const __grid_constant__ ptx::TensorMap sum, int tiles, int fault) {
  switch (fault) {
CASES
  }
}
"""
HOPPER_FAULTS = (
    "released_before_the_product", "released_by_one_warp", "no_product_wait", "no_full_wait", "wrong_parity",
    "too_few_bytes", "too_many_bytes", "no_barrier_after_init", "no_init_fence", "no_wgmma_fence", "no_proxy_fence",
    "no_store_wait", "three_warps",
)  # fmt: skip
# Races that do not show under a friendly schedule, with words from the lines of both accesses.
HOPPER_RACES = {
    "released_before_the_product": ("multiplies", "copies"),
    "released_by_one_warp": ("multiplies", "copies"),
    "no_product_wait": ("multiplies", "copies"),
    "no_barrier_after_init": ("waits for tiles", "makes"),
}
_CASES = ("None", *("".join(word.capitalize() for word in name.split("_")) for name in HOPPER_FAULTS))
HOPPER_PIPELINE = HOPPER_PIPELINE.replace(
    "CASES", "\n".join(f"    case k{name}: return run<k{name}>(&a, &b, &sum, tiles);" for name in _CASES)
)


def run_hopper_pipeline(
    kernel: sim.Kernel, schedule: sim.Schedule, fault: int = 0, tiles: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pipeline's result and the expected one."""
    rng = np.random.default_rng(tiles)
    a, b = (rng.integers(-4, 5, (1, 1, 64, 64 * tiles)).astype(np.float16) for _ in range(2))
    out = np.full((1, 1, 64, 64), np.nan, np.float32)
    maps = [
        simulated(BoxedArray(x.dtype, x.shape, x.strides, (1, 1, 64, 64), swizzle), x.ctypes.data)
        for x, swizzle in ((a, 128), (b, 128), (out, 0))
    ]
    kernel(1, 256, (*maps, np.int32(tiles), np.int32(fault)), 49152 + 32, schedule, time_limit=20.0)
    return out[0, 0], a[0, 0].astype(np.float32) @ b[0, 0].astype(np.float32).T


HOPPER_CHILD = """
import sys
from pathlib import Path
import sim_probes
from cuflash import sim
sanitize, cache = sys.argv[1:]
sim.compiler.cache_directory = lambda: Path(cache)
kernel = sim_probes.build(sim_probes.HOPPER_PIPELINE, "hopper_pipeline", sanitize)
for copies in ("eager", "late", "random"):
    out, expected = sim_probes.run_hopper_pipeline(kernel, sim.Schedule(copies=copies, order="random"))
    assert (out == expected).all()
print("correct: done", file=sys.stderr)
if sanitize == "thread":
    for name in sim_probes.HOPPER_RACES:
        sim_probes.run_hopper_pipeline(kernel, sim.Schedule(), sim_probes.HOPPER_FAULTS.index(name) + 1)
        print(f"{name}: done", file=sys.stderr)
print("end", file=sys.stderr)
"""

# Runs under a sanitizer: the sanitizer's reports go to stderr, and the simulator's own to stdout.
CHILD = """
import sys
from pathlib import Path
import sim_probes
from cuflash import sim
sanitize, cache = sys.argv[1:]
sim.compiler.cache_directory = lambda: Path(cache)
kernel = sim_probes.build(sim_probes.PIPELINE, "pipeline", sanitize)
for copies in ("eager", "late", "random"):
    out, expected = sim_probes.run_pipeline(kernel, sim.Schedule(copies=copies, order="random"))
    assert (out == expected).all()
print("correct: done", file=sys.stderr)
if sanitize == "thread":
    for fault, name in enumerate(sim_probes.PIPELINE_FAULTS, start=1):
        sim_probes.run_pipeline(kernel, sim.Schedule(), fault)
        print(f"{name}: done", file=sys.stderr)
    sim_probes.run_pipeline(kernel, sim.Schedule(), sim_probes.ENDLESS, time_limit=0.2)
else:
    try:
        sim_probes.run_pipeline(kernel, sim.Schedule(), short=2)
    except sim.SimulationError as error:
        print(error, flush=True)
    sim_probes.run_pipeline(kernel, sim.Schedule(), sim_probes.STORE_PAST_THE_END)
print("end", file=sys.stderr)
"""
