"""Pipelines of the sm90 family take a specification as a parameter, so several can share one translation unit."""

from __future__ import annotations

import re

import numpy as np
from cuflash import DeviceSpec, ShapeDtype, sim
from cuflash.compiler import source as room
from cuflash.planning.families.family import Request
from cuflash.planning.problem import Problem
from cuflash.planning.routing import FAMILIES
from cuflash.planning.spec import KernelSpec
from executors import needs_compiler

KERNEL = """
#include <sm90/forward_hooks.cuh>
#include <sm90/kv_pipeline.cuh>
#include <sm90/q_pipeline.cuh>
using namespace cuflash;
using namespace cuflash::sm90;
using OverKeys = KvPipeline<Forward64>;
using OverMoreKeys = KvPipeline<Forward128>;
using OverQueries = QPipeline<Backward64>;
using OverWideQueries = QPipeline<Backward192>;
static_assert(OverKeys::kHeadDim == 64 && OverMoreKeys::kHeadDim == 128 && OverQueries::kHeadDim == 64);
static_assert(!OverQueries::kIsWide && OverWideQueries::kIsWide);
static_assert(OverKeys::kArraysEnd != OverMoreKeys::kArraysEnd);
extern "C" __global__ void pipelines(const __grid_constant__ attention::Params params,
                                     const __grid_constant__ TensorMaps maps,
                                     const __grid_constant__ QueryState query_state) {
  if (blockIdx.x == 0)
    OverKeys::produce<ForwardHooks<Forward64>>(params, maps, sink, pages, scales, score_function, staged_map,
                                               attention::chosen);
  else
    OverQueries::run_roles(params, maps, query_state, [](int) {}, score_function, staged_map, attention::chosen);
}
"""


def specs() -> dict[str, KernelSpec]:
    """Return a specification for each pipeline, by the name of its structure."""
    specs_of = {}
    for head_dim in (64, 128, 192):
        problem = Problem.of(*[ShapeDtype((1, 4, 300, head_dim), np.dtype(np.float16))] * 3)
        of_passes = FAMILIES["sm90"].specs(Request(problem, DeviceSpec.gpu("H100")))
        specs_of.update({f"{name.partition('_')[0].capitalize()}{head_dim}": each for name, each in of_passes.items()
                         if name in ("forward", "backward", "backward_wide")})  # fmt: skip
    return {name: specs_of[name] for name in ("Forward64", "Forward128", "Backward64", "Backward192")}


def text(*, host: bool) -> str:
    """Return one text with all of `specs`; the first also supplies the constants that each file's instructions need."""
    structures = [re.sub("struct Config", f"struct {name}", room.constants(spec)) for name, spec in specs().items()]
    constants = "\n".join(["#include <ptx/types.cuh>", room.constants(specs()["Forward64"]), *structures])
    without_macros = "\n".join(line for line in constants.splitlines() if not line.startswith("#define"))
    return room.flatten_text(without_macros + KERNEL, "test_two_pipelines.py", host=host)


@needs_compiler
def test_two_pipelines_build_for_the_simulator_in_one_unit() -> None:
    sim.build(text(host=True), "pipelines")


def test_two_pipelines_compile_in_one_unit(nvrtc: tuple[int, int]) -> None:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch="sm_90a", std="c++17", ofast_compile="mid")
    assert b"pipelines" in Program(text(host=False), "c++", options=options).compile("cubin").code


def test_no_pipeline_reads_the_constants_of_one_kernel() -> None:
    """Headers of attention/ that read the translation unit's own `Config` are kept in separate files, config_*.cuh."""
    assert "kernels_cu/attention/config_" not in text(host=False)
