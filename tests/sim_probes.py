"""Small kernels for the simulator's tests, and the way to build them: also imported by children under a sanitizer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from cuflash import sim

PTX = Path(sim.__file__).parent / "ptx"


def expand(text: str, name: str, seen: set[str] | None = None) -> str:
    """The text with each ptx file in place of its first include."""
    seen = set() if seen is None else seen
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.split("\n"), start=1):
        include = re.fullmatch(r"#include <ptx/(\w+\.cuh)>", line)
        if include is None:
            lines.append("" if line == "#pragma once" else line)
        else:
            file = include[1]
            if file not in seen:
                seen.add(file)
                lines.append(expand((PTX / file).read_text("utf-8"), f"ptx/{file}", seen))
            lines.append(f'#line {number + 1} "{name}"')
    return "\n".join(lines)


def build(text: str, entry: str, sanitize: sim.compiler.Sanitizer = "") -> sim.Kernel:
    return sim.build(expand(text, f"{entry}.cu"), entry, sanitize=sanitize)


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
enum Fault { kNone, kNoBarrierBeforeReading, kNoBarrierAfterReading, kWaitTooFew, kNoLastCommit };
constexpr int kThreads = 96, kTile = 4 * kThreads;

CUFLASH_DEVICE void load(const Params& params, float* stages, int tile) {
  const uint32_t to = ptx::shared_address(stages + tile % 2 * kTile + 4 * threadIdx.x);
  const float* from = params.in + (blockIdx.x * params.tiles + tile) * kTile + 4 * threadIdx.x;
  if (tile < params.tiles)
    ptx::cp_async_cg_16(to, from, 16);  // copies
  if (tile < params.tiles || params.fault != kNoLastCommit) ptx::cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(kThreads) pipeline(const Params params) {
  float* stages = ptx::dynamic_shared<float>();
  float sum = 0.0f;
  load(params, stages, 0);
  for (int tile = 0; tile < params.tiles; ++tile) {
    load(params, stages, tile + 1);
    if (params.fault == kWaitTooFew) ptx::cp_async_wait<2>();
    else ptx::cp_async_wait<1>();
    if (params.fault != kNoBarrierBeforeReading) __syncthreads();
    const float* part = stages + tile % 2 * kTile + 4 * ((threadIdx.x + 32) % kThreads);
    for (int i = 0; i < 4; ++i)
      sum += static_cast<float>(i + 1) * part[i];  // reads
    if (params.fault != kNoBarrierAfterReading) __syncthreads();
  }
  ptx::cp_async_wait<0>();
  params.out[blockIdx.x * kThreads + threadIdx.x] = sum;  // writes
}
"""
PIPELINE_FAULTS = ("no_barrier_before_reading", "no_barrier_after_reading", "wait_too_few", "no_last_commit")
PIPELINE_PARAMS = np.dtype([("in", "u8"), ("out", "u8"), ("tiles", "i4"), ("fault", "i4")], align=True)


def run_pipeline(
    kernel: sim.Kernel, schedule: sim.Schedule, fault: int = 0, blocks: int = 2, short: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """What the pipeline computes, and what it should; `short` elements are missing from the end of its input."""
    tiles = 3
    data = np.arange(blocks * tiles * 384, dtype=np.float32) % 37
    given = data[: data.size - short].copy()
    out = np.full((blocks, 96), np.nan, np.float32)
    params = np.array((given.ctypes.data, out.ctypes.data, tiles, fault), PIPELINE_PARAMS)[()]
    kernel(blocks, 96, (params,), 2 * 384 * 4, schedule)
    expected = (data.reshape(blocks, tiles, 96, 4) @ np.arange(1, 5, dtype=np.float32)).sum(1)
    return out, np.roll(expected, -32, axis=1)


# Run under a sanitizer: reports go to stderr, what the simulator itself finds to stdout.
CHILD = """
import sys
from pathlib import Path
import numpy as np
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
    loop = sim_probes.build(sim_probes.LOOP, "loop", sanitize)
    sys.stdout.flush()
    loop(1, 32, (np.zeros(32, np.int32),), time_limit=0.2)
else:
    try:
        sim_probes.run_pipeline(kernel, sim.Schedule(), short=2)
    except sim.SimulationError as error:
        print(error, flush=True)
    store = sim_probes.build(sim_probes.STORE, "store", sanitize)
    store(1, 64, (np.zeros(5000, np.float32), np.int32(4950)))
print("end", file=sys.stderr)
"""

LOOP = """extern "C" __global__ void loop(volatile int* x) {
  __syncwarp();  // before
  for (;;)
    x[threadIdx.x] = 1;  // forever
}
"""

STORE = """extern "C" __global__ void store(float* x, int start) {
  x[start + static_cast<int>(threadIdx.x)] = 1.0f;  // past the end
}
"""
