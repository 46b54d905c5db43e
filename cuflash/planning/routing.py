"""Chooses the family of kernels that serves a call."""

from __future__ import annotations

from ..blocks.work_list import ListedWork, WorkList
from ..errors import UnsupportedProblem
from ..masks.base import Mask
from .chosen_lists import UnionWork, union_work
from .device import DeviceSpec
from .families.fa1 import FlashAttention1
from .families.family import Family
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
PREFILL_FAMILIES = (SM90, SM80)  # of their forward kernels, the first that serves a call attends to pages of a cache
EIGHT_BITS = SM90  # what kernel= may call the family of numbers of 8 bits, beside "auto"
_MASS_FAMILIES = (SM90, SM80, SIMT)  # the first with a kernel of block masses for a call makes them
_FP8 = Sm90Fp8()
_TALLEST = 128  # queries of the sm90 family's usual tile


def family_of(spec: KernelSpec) -> Family:
    """The family of attention on whose chips a kernel runs."""
    return FAMILIES[spec.entry.runs_as or spec.family]


def named(kernel: str, problem: Problem) -> Family:
    """The family of kernels that a name other than "auto" stands for."""
    return FAMILIES[kernel] if problem.rows_per_scale is None else _FP8


def routed(problem: Problem, device: DeviceSpec) -> tuple[Family, str]:
    """The family that kernel="auto" stands for, and why: the first row that serves the problem on the device.

    ============================================  ======
    numbers of 8 bits with scales                 sm90
    precision 'tf32' or 'tf32x3'                  sm80
    float16, bfloat16, compute capability 9.0     sm90
    float16, bfloat16, compute capability >= 8.0  sm80
    everything                                    simt
    ============================================  ======

    All rows take score functions and dropout. Of the gradients that sm90 is then routed for, the sm80 family's kernels
    make those above 128 columns, of lists in blocks below 128 x 128, and of any list with `deterministic=True`.

    sm90 is passed over where its tiles of 128 queries are fewer than multiprocessors, where sm80 is faster.
    """
    if problem.rows_per_scale is not None:
        return _FP8, "numbers of 8 bits on Hopper's tensor cores"
    if problem.precision != "ieee":
        return FAMILIES[SM80], "it has the precision of the call"
    num_tiles = problem.num_batch_heads * -(-problem.seqlen_q // _TALLEST)
    hopper, tensor_cores = FAMILIES[SM90], FAMILIES[SM80]
    if not hopper.reasons(problem, device) and num_tiles >= device.num_processors:
        return hopper, "16-bit elements on Hopper's tensor cores"
    if not tensor_cores.reasons(problem, device):
        return tensor_cores, "16-bit elements on tensor cores, from compute capability 8.0 on"
    return FAMILIES[SIMT], "it serves every dtype, mask and chip"


def mass_kernel(problem: Problem, device: DeviceSpec, block_kv: int, *, is_listed: bool) -> KernelSpec:
    """The kernel that sums softmax weights over blocks of so many keys.

    Raises
    ------
    UnsupportedProblem
        No tile fits a multiprocessor.
    """
    specs = (FAMILIES[name].mass_spec(problem, device, block_kv, is_listed=is_listed) for name in _MASS_FAMILIES)
    return next(spec for spec in specs if spec is not None)


def unions(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str) -> UnionWork | None:
    """The work of a mask whose queries each choose their blocks, for kernels that walk unions; None for other kernels.

    The sm80 family has such kernels. They add up no gradients of captured arrays, and take no dropout.
    """
    if kernel not in ("auto", SM80) or problem.dropout is not None:
        return None
    if problem.score is not None and captured_wrt(problem):
        return None
    family = FAMILIES[SM80]
    assert isinstance(family, Sm80)
    if problem.dtype not in family.dtypes or family.reasons(problem, device):
        return None
    work = union_work(mask, problem)
    if work is None:
        return None
    try:
        family.union_specs(problem, device, work.tiling.block)
    except UnsupportedProblem:  # no tile fits
        return None
    return work


def rerouted(family: Family, work: WorkList) -> tuple[Family, str] | None:
    """The family that kernel="auto" takes instead once the list is known, and why; None where the first one stays.

    sm80 is faster than sm90 where a list's blocks are not multiples of 64 queries and 64 keys.
    """
    if family.name != SM90 or not isinstance(work, ListedWork):
        return None
    if work.block_q % ROWS == 0 and work.block_kv % ROWS == 0:
        return None
    return FAMILIES[SM80], "16-bit elements on tensor cores, in blocks that are not made of 64 x 64"
