"""How many exponentials does a multiprocessor compute per cycle, as single numbers and as packed 16-bit pairs?

    python -m experiments exponential_rate

FP8 attention weights have 4 significant bits of an exponential, and PTX has an `ex2.approx` for two 16-bit numbers in
one register. If it computed two results in the time of one, such weights would cost half. Each row is an instruction:
one thread block per multiprocessor runs, whose threads each compute `rounds` times eight exponentials in independent
chains. `per_cycle` is the number of results divided by the clock cycles of the multiprocessor from the start of the
first thread to the end of the last: the median over the multiprocessors, and the best of `repeats` launches.

Needs an NVIDIA GPU of compute capability 9.0 or newer, and CuPy.

Expect: 16 results per cycle with each instruction, the rate that `cuflash.study.roofline` assumes, so that packed
instructions save nothing.
Found:  NVRTC 13.0 compiles each packed instruction to two instructions of the unit for exponentials (fp8_steps.log at
commit b648872e). No rate has been published yet.

Cost: Seconds of a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from harness import Record, gpu_versions, main, track, why_no_gpu
from rich.table import Table

OLDEST = (9, 0)  # oldest compute capability; older GPUs have no bf16x2
CHAINS, THREADS = 8, 1024
# Instructions, with the number of results of each.
INSTRUCTIONS = {
    "ex2.approx.ftz.f32": ("{.reg .f32 y; mov.b32 y, %0; ex2.approx.ftz.f32 y, y; mov.b32 %0, y;}", 1),
    "ex2.approx.f16x2": ("ex2.approx.f16x2 %0, %0;", 2),
    "ex2.approx.ftz.bf16x2": ("ex2.approx.ftz.bf16x2 %0, %0;", 2),
}
SOURCE = """
extern "C" __global__ void __launch_bounds__(%(threads)d)
exponentials(long long* cycles, unsigned* results, int rounds) {
  __shared__ long long first, last;
  if (threadIdx.x == 0) first = 0x7fffffffffffffffll, last = 0;
  unsigned x[%(chains)d];
  for (int j = 0; j < %(chains)d; ++j) x[j] = threadIdx.x + j;
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 4
  for (int i = 0; i < rounds; ++i)
#pragma unroll
    for (int j = 0; j < %(chains)d; ++j) asm volatile("%(instruction)s" : "+r"(x[j]));
  const long long end = clock64();
  atomicMin(&first, begin);
  atomicMax(&last, end);
  unsigned sum = 0;
  for (int j = 0; j < %(chains)d; ++j) sum += x[j];
  results[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = last - first;
}
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Instructions to time."""

    instructions: tuple[str, ...] = tuple(INSTRUCTIONS)
    rounds: int = 4096
    repeats: int = 5

    def __post_init__(self) -> None:
        if unknown := set(self.instructions) - set(INSTRUCTIONS):
            raise ValueError(f"no {', '.join(sorted(unknown))} in instructions; there are {', '.join(INSTRUCTIONS)}")


def source(instruction: str) -> str:
    """Return the source of the kernel that computes exponentials with an instruction."""
    return SOURCE % {"threads": THREADS, "chains": CHAINS, "instruction": INSTRUCTIONS[instruction][0]}


def per_cycle(instruction: str, rounds: int, cycles: np.ndarray) -> float:
    """Return the results per multiprocessor and cycle, from the cycles of each multiprocessor."""
    return THREADS * CHAINS * rounds * INSTRUCTIONS[instruction][1] / float(np.median(cycles))


def run(config: Config) -> Iterator[Record]:
    """Yield a row for each instruction."""
    if reason := why_no_gpu():
        raise SystemExit(f"exponential_rate times instructions on a GPU: {reason}")
    import cupy

    device = cupy.cuda.Device()
    number = int(device.compute_capability)
    if divmod(number, 10) < OLDEST:
        raise SystemExit(f"exponential_rate needs compute capability 9.0 or newer; got {number / 10}")
    blocks = device.attributes["MultiProcessorCount"]
    cycles, results = cupy.empty(blocks, np.int64), cupy.empty(blocks * THREADS, np.uint32)
    for instruction in track(config.instructions, "instructions"):
        kernel = cupy.RawKernel(source(instruction), "exponentials")
        rates = []
        for _ in range(config.repeats + 1):  # the first launch is not counted
            kernel((blocks,), (THREADS,), (cycles, results, np.int32(config.rounds)))
            rates.append(per_cycle(instruction, config.rounds, cycles.get()))
        row = {"instruction": instruction, "results_at_once": INSTRUCTIONS[instruction][1]}
        yield row | {"per_cycle": max(rates[1:]), "repeats": config.repeats, **gpu_versions()}


def table(records: list[Record]) -> Table:
    """Tabulate one line per instruction."""
    result = Table("instruction", "results at once", "results in a cycle")
    for row in records:
        result.add_row(row["instruction"], str(row["results_at_once"]), f"{row['per_cycle']:.2f}")
    return result


if __name__ == "__main__":
    main(Config, run, table)
