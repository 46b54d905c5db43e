"""The choice of the kernel family that serves a call."""

from __future__ import annotations

from contextlib import suppress

from ..blocks.work_list import ListedWork, WorkList
from ..errors import UnsupportedProblem
from ..masks.base import Mask
from .chosen_lists import UnionWork, union_work
from .device import DeviceSpec
from .families.fa1 import FlashAttention1
from .families.family import Family, Request
from .families.naive import Naive
from .families.simt import Simt
from .families.sm80 import Sm80
from .families.sm90 import Sm90
from .families.sm90_fp8 import Sm90Fp8
from .families.sm90_storage import ROWS
from .problem import Problem
from .score_launches import captured_wrt
from .spec import SIMT, SM80, SM90, KernelSpec

FAMILIES: dict[str, Family] = {family.name: family for family in (Simt(), Sm80(), Sm90(), Naive(), FlashAttention1())}
PREFILL_FAMILIES = (SM90, SM80)  # families with prefill kernels for a paged cache; the first that serves a call is used
EIGHT_BITS = SM90  # the value of kernel=, other than "auto", that selects the FP8 family
_UNION_FAMILIES = (SM90, SM80)  # families with kernels for block lists per query; the first that serves a call is used
_MASS_FAMILIES = (SM90, SM80, SIMT)  # families with kernels for block masses; the first that serves a call is used
_FP8 = Sm90Fp8()
_TALLEST = 128  # queries per tile in most kernels of the sm90 family


def family_of(spec: KernelSpec) -> Family:
    """Return the attention family that supports the same chips as a kernel."""
    return FAMILIES[spec.entry.runs_as or spec.family]


def named(kernel: str, problem: Problem) -> Family:
    """Return the family that a value of `kernel=` other than "auto" selects."""
    return FAMILIES[kernel] if problem.rows_per_scale is None else _FP8


def routed(problem: Problem, device: DeviceSpec) -> tuple[Family, str]:
    """Return the family that kernel="auto" selects, and why: the first row that serves the problem on the device.

    ============================================  ======
    FP8 (e4m3) operands with scales               sm90
    precision 'tf32' or 'tf32x3'                  sm80
    float16, bfloat16, compute capability 9.0     sm90
    float16, bfloat16, compute capability >= 8.0  sm80
    everything                                    simt
    ============================================  ======

    All rows support score functions and dropout. With either, sm90 uses sm80's backward kernels if head_dim exceeds
    128, if a block list has blocks below 128 x 128, and for all block lists with `deterministic=True`.

    sm80 is used instead of sm90, because it is faster, if there are fewer tiles of 128 queries than multiprocessors.
    The forward pass of few queries uses another kernel (`few_queries.with_few_queries`).
    """
    if problem.rows_per_scale is not None:
        return _FP8, "FP8 (e4m3) operands on Hopper's tensor cores"
    if problem.precision != "ieee":
        return FAMILIES[SM80], "it supports the call's precision"
    num_tiles = problem.num_batch_heads * -(-problem.seqlen_q // _TALLEST)
    hopper, tensor_cores = FAMILIES[SM90], FAMILIES[SM80]
    if not hopper.reasons(problem, device) and num_tiles >= device.num_processors:
        return hopper, "16-bit elements on Hopper's tensor cores"
    if not tensor_cores.reasons(problem, device):
        return tensor_cores, "16-bit elements on tensor cores of compute capability 8.0 or newer"
    return FAMILIES[SIMT], "it serves every dtype, mask and chip"


def mass_kernel(request: Request, block_kv: int) -> KernelSpec:
    """Return the kernel that sums softmax weights over blocks of `block_kv` keys.

    Raises
    ------
    UnsupportedProblem
        No tile fits in the shared memory of a multiprocessor.
    """
    specs = (FAMILIES[name].mass_spec(request, block_kv) for name in _MASS_FAMILIES)
    return next(spec for spec in specs if spec is not None)


def unions(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str) -> tuple[Family, UnionWork] | None:
    """Return the family whose kernels walk unions of block lists, and their work; None if no family serves the call.

    The mask must list blocks per query. The kernels support neither gradients of captured arrays nor dropout nor
    tangents, and sm90's kernels do not support score functions. sm80 is used instead of sm90 if there are fewer tiles
    than multiprocessors.
    """
    names = [name for name in _UNION_FAMILIES if kernel in ("auto", name)]
    if not names or problem.tangents or problem.dropout is not None:
        return None
    if problem.score is not None and captured_wrt(problem):
        return None
    families = [FAMILIES[name] for name in names if _serves(FAMILIES[name], problem, device)]
    work = union_work(mask, problem) if families else None
    if work is None:
        return None
    tiling = work.tiling
    tiles = problem.num_batch_heads // tiling.heads_per_tile * tiling.num_tiles
    for family in families:
        if family.name == SM90 and kernel == "auto" and tiles < device.num_processors:
            continue
        with suppress(UnsupportedProblem):  # no tile fits
            if family.union_specs(Request(problem, device), tiling.block, tiling.heads_per_tile):
                return family, work
    return None


def _serves(family: Family, problem: Problem, device: DeviceSpec) -> bool:
    return problem.dtype in family.dtypes and not family.reasons(problem, device)


def rerouted(family: Family, work: WorkList) -> tuple[Family, str] | None:
    """Return the family that kernel="auto" selects after the work list is known, and why; None if it does not change.

    sm80 is faster than sm90 if the block sizes of a list are not multiples of 64 queries and 64 keys.
    """
    if family.name != SM90 or not isinstance(work, ListedWork):
        return None
    if work.block_q % ROWS == 0 and work.block_kv % ROWS == 0:
        return None
    return FAMILIES[SM80], "16-bit elements on tensor cores, in blocks that are not multiples of 64 x 64"
