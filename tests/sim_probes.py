"""Small kernels for the simulator's tests, and the way to build them: also imported by children under a sanitizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cuflash import sim
from cuflash.source import flatten_text

PTX = Path(sim.__file__).parent / "ptx"


def build(text: str, entry: str, sanitize: sim.Sanitizer = "") -> sim.Kernel:
    return sim.build(flatten_text(text, f"{entry}.cu", host=True), entry, sanitize=sanitize)


def line_of(text: str, marker: str) -> int:
    """The number of the one line that ends with this marker."""
    (found,) = [i for i, line in enumerate(text.split("\n"), start=1) if line.endswith(marker)]
    return found


# Two stages, each thread copies 16 bytes of a tile and reads what another warp copied. Each fault is one line away.
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
    """What the pipeline computes, and what it should; `short` elements are missing from the end of its input."""
    blocks, tiles = 2, 3
    data = np.arange(blocks * tiles * 384, dtype=np.float32) % 37
    given = data[: data.size - short].copy()
    out = np.full((blocks, 96), np.nan, np.float32)
    params = np.array((given.ctypes.data, out.ctypes.data, tiles, fault), PIPELINE_PARAMS)[()]
    kernel(blocks, 96, (params,), 2 * 384 * 4, schedule, time_limit=time_limit)
    expected = (data.reshape(blocks, tiles, 96, 4) @ np.arange(1, 5, dtype=np.float32)).sum(1)
    return out, np.roll(expected, -32, axis=1)


# Run under a sanitizer: reports go to stderr, what the simulator itself finds to stdout.
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
