"""The compile gate: each kernel compiles for each chip that it supports, without spills and without ptxas advisories.

CUFLASH_PROFILE=long compiles all kernels. The ci profile compiles enough kernels to cover each kernel, each value of
each field except tile sizes in a family's kernels for results and in those for gradients, narrow and wide heads in
both, and each tuned family on each chip. float16 and bfloat16 kernels differ only by conversions and count as one;
both occur in each family. Ways to sum gradients of captured arrays, which families share, occur in one of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import cuflash
from cuflash import DeviceSpec, Dropout, ShapeDtype, UnsupportedProblem, masks, scores
from cuflash.cache.scoring import ScoreKind, score_of
from cuflash.compiler import nvrtc as room
from cuflash.compiler import source as sources
from cuflash.arrays import BFLOAT16, DTYPES, UP_TO_FLOAT32
from cuflash.compiler.nvrtc import Compiled
from cuflash.planning._result_kernels import every_result_spec
from cuflash.planning.appending import append_spec, bounds_spec
from cuflash.planning.chosen_lists import COLUMN_SPECS, UNIONS
from cuflash.planning.decoding import decode_spec
from cuflash.planning.few_queries import FEW_QUERIES_ENTRY
from cuflash.planning.prefill import intervals_spec, prefill_spec
from cuflash.planning.problem import PRECISIONS, Problem
from cuflash.planning.spec import KernelSpec
from cuflash.planning.families import sm80
from cuflash.planning.families._passes import second_statistics_spec
from cuflash.planning.families.sm90 import SHORT_SEQUENCES, in_small_tiles
from cuflash.planning.families.sm90_fp8 import Sm90Fp8
from cuflash.planning.families.family import DIMS, Family, Request
from cuflash.planning.routing import FAMILIES, PREFILL_FAMILIES, mass_kernel
from cuflash.planning.interval_kernels import INTERVAL_SPECS
from cuflash.planning.list_kernels import LIST_SPECS
from cuflash.planning.page_choice import every_page_spec
from cuflash.planning.query_scores import every_query_spec
from cuflash.planning.selection_kernels import every_selection_spec
from cuflash.planning.quantizing import quantize_spec, transpose_spec
from cuflash.planning.scales import RowsPerScale
from cuflash.planning.captured_sums import sums_spec
from cuflash.planning.sinks import gradient_spec
from cuflash.scores._primitives import PRIMITIVES
from executors import is_long

# One chip for each shared-memory size and each instruction set that the kernels use.
CHIPS = ("T4", "A100", "RTX 3090", "L4", "H100", "B200", "RTX 5090")
MOST_SPECS, MOST_SPECS_OF_A_GPU = 14000, 11000
LENGTHS = (1, 1000)  # a query tile with few queries, and a full one
TANGENTS = (("q",), ("k", "v"), ("q", "k", "v"))  # the long profile has no other combinations either
SECOND_TANGENTS = (("q", "k", "v"), ("q", "k", "v", "do"), ("do",))
SIZES_OF_TILES = {"block_q", "block_kv", "num_warps", "min_blocks", "num_stages"}
Limit: TypeAlias = tuple[int, int] | None
# Allowed bytes of spills, by kernel, dtype and head_dim. simt: at 256, there is no smaller tile, and this one holds 16
# rows of 512 sums; at 128, the next smaller tile does not spill but is slower by a seventh (simt_tiles.log at commit
# b648872e). Kernels on tensor cores spill words that a step reads once.
_HALVES = (np.dtype(np.float16), BFLOAT16)
SPILLS = {
    ("simt_forward", np.dtype(np.float64), 256): 36,  # on sm_120; 16 on sm_100; not timed on either
    ("simt_backward_columns", np.dtype(np.float64), 256): 176,  # on sm_100; 16 on other chips
    ("simt_backward", np.dtype(np.float64), 128): 28,
    ("simt_backward", np.dtype(np.float64), 192): 28,  # on sm_100
    ("simt_backward", np.dtype(np.float64), 256): 452,
    ("simt_backward_columns", np.dtype(np.float64), 32): 260,  # on sm_90; 12 on sm_100
    ("simt_backward_columns", np.dtype(np.float64), 64): 36,
    # with NVRTC 13.5; 36 with 13.0; only if deterministic=True
    ("simt_backward_columns", np.dtype(np.float32), 128): 112,
    ("naive_gradient_keys", np.dtype(np.float32), 32): 116,  # on sm_120; the baseline is not tuned
    ("naive_gradient_keys", np.dtype(np.float16), 32): 116,  # on sm_100
    # On sm_120, where a tile holds few queries, and on sm_100, where blocks share keys. Neither chip was timed.
    **{("sm80_forward", dtype, 128): 16 for dtype in _HALVES},
    **{("sm80_forward", dtype, 256): 12 for dtype in _HALVES},
    **{("sm80_backward", dtype, 256): 8 for dtype in _HALVES},  # on sm_100
    # In the producer warpgroup, which has 24 registers per thread and also keeps the time at which it began to wait.
    **{("sm90_backward watched", dtype, 128): 20 for dtype in _HALVES},
    # A thread has 96 registers, so that two blocks of nine warps fit. A step of 64 keys would not spill, but is slower
    # by a sixth (selection_steps.log at commit b648872e).
    **{("sm90_block_mass", dtype, dim): 92 for dtype in _HALVES for dim in (32, 64, 96, 128)},
    **{("sm90_block_mass watched", dtype, dim): 92 for dtype in _HALVES for dim in (32, 64, 96, 128)},
    # With a list and a sink; 112 to 172 without. Consumers keep two accumulators, and a producer thread, which walks
    # the list, has 24 registers.
    **{("sm90_forward_fp8", dtype, 128): 260 for dtype in (*_HALVES, np.dtype(np.float32))},
    ("sm80_forward", np.dtype(np.float32), 192): 12,  # tf32x3 on sm_100, where a tile holds few queries
    # Score functions and dropout use the tiles of plain attention; a function's values for several elements spill.
    # Smaller tiles were not timed. At 128 columns most functions do not spill on Hopper.
    ("sm80_backward scored", BFLOAT16, 64): 342,
    ("sm80_backward scored", BFLOAT16, 128): 30,
    ("sm80_backward scored dropped", BFLOAT16, 64): 22,
    ("sm80_forward dropped", BFLOAT16, 128): 16,
    ("sm80_forward scored dropped", BFLOAT16, 64): 32,  # if several thread blocks share keys
    ("sm80_forward scored dropped", BFLOAT16, 128): 16,
    ("sm90_forward scored", BFLOAT16, 64): 40,  # for ALiBi
    # Paged caches use the tiles of plain attention.
    ("sm80_forward scored in pages", BFLOAT16, 64): 252,  # 96 on sm_80
    ("sm80_forward scored in pages", BFLOAT16, 128): 72,  # on sm_80; 36 on sm_90
    ("sm80_forward scored in pages", BFLOAT16, 256): 60,
    ("sm90_forward scored in pages", BFLOAT16, 64): 48,
    ("sm90_forward scored in pages", BFLOAT16, 128): 16,
    ("sm90_forward scored in pages", BFLOAT16, 256): 64,
    # Four tiles of scores, and sums of 128 columns. A step of 16 rows was not timed.
    **{("sm80_jvp", dtype, 64): 20 for dtype in _HALVES},  # on sm_90: its tiles were not timed
    ("sm80_backward_jvp_rows dropped", BFLOAT16, 64): 80,  # on sm_80
    **{("sm80_backward_jvp_rows", dtype, 128): 8 for dtype in _HALVES},  # on sm_90
    **{("sm80_backward_jvp_columns", dtype, 128): 164 for dtype in _HALVES},  # on sm_120
    # With a list, for which a producer thread has 40 registers; 32 without the tangent of dO.
    **{("sm90_backward_jvp_rows", dtype, 128): 48 for dtype in _HALVES},
    # With the tangent of dO and a list, at 64 columns; 212 to 440 with the tangent alone, 164 to 184 with a list alone,
    # and 0 with neither.
    **{("sm90_backward_jvp_columns", dtype, dim): 576 for dtype, dim in product(_HALVES, (32, 64, 96, 128))},
    # Calls with a sink use the tiles of plain attention; neither kernel was timed with a sink.
    **{("sm90_forward with a sink", dtype, 64): 20 for dtype in _HALVES},  # tiles of 256 queries
    **{("sm80_decode_e4m3 with a sink", dtype, 128): 24 for dtype in _HALVES},  # on sm_120; 16 on sm_90
    # Tiles of 64 rows, whose 16 warps leave 128 registers per thread.
    ("sm80_decode scored", BFLOAT16, 128): 8,  # on sm_80
    **{("sm80_decode of chosen blocks", dtype, 128): 8 for dtype in _HALVES},  # tiles of 32 rows, on sm_80
    **{("sm80_decode_e4m3 of chosen blocks", dtype, 128): 16 for dtype in _HALVES},
    **{
        (f"sm80_{entry}{scored} in fixed parts", BFLOAT16, 128): 8
        for entry, scored in product(("decode", "decode_e4m3"), ("", " scored"))
    },
    ("sm90_backward scored", BFLOAT16, 64): 384,  # for the gradient of a bias; 344 with a softcap
    ("sm90_backward scored", BFLOAT16, 128): 60,  # for the gradient of a table
}


def every_spec(name: str, dims: Iterable[tuple[int, int]], limits: Iterable[Limit] = (None,)) -> set[KernelSpec]:
    """Return each specification that tile choice returns for a known GPU, for these dimensions and list limits."""
    device, specs = DeviceSpec.gpu(name), set()
    for dtype, (head_dim, value_dim), length, precision in product(DTYPES, dims, LENGTHS, PRECISIONS):
        q, k, v = (ShapeDtype((h, length, dim), dtype) for h, dim in ((2, head_dim), (1, head_dim), (1, value_dim)))
        try:
            problem = Problem.of(q, k, v, precision=precision)
        except UnsupportedProblem:  # the dtype does not support the precision
            continue
        for family, limit, deterministic in product(FAMILIES, limits, (False, True)):
            if FAMILIES[family].reasons(problem, device):
                continue
            with suppress(UnsupportedProblem):  # no tile fits
                family_specs = FAMILIES[family].specs(Request(problem, device, limit, deterministic))
                specs |= set(family_specs.values())
                is_first = not deterministic  # most of the following kernels are the same for both
                if is_first and family in ("simt", "sm80"):
                    least = 1 if family == "simt" else 128
                    specs.add(mass_kernel(Request(problem, device, limit), least))
                if is_first and family in ("simt", "sm80", "sm90") and (precision, head_dim) == ("ieee", value_dim):
                    if limit is None or (family == "sm90" and min(limit) >= 64):
                        specs |= of_tangents(FAMILIES[family], problem, device, limit)
                if is_first and family == "sm90":  # queries that see many keys or few, of one problem and of a thousand
                    many = (ShapeDtype((1000, *x.shape), dtype) for x in (q, k, v))
                    thousand = Problem.of(*many, precision=precision)
                    for variant, keys in ((problem, 1 << 14), (problem, 256), (thousand, 256)):
                        specs |= set(FAMILIES[family].specs(Request(variant, device, limit), num_keys=keys).values())
                walk = family_specs.get("backward") if family == "sm90" else None
                if walk is not None and walk.name == "sm90_backward" and walk.dq_atomic_width:
                    finishing = ("backward", "backward_statistics")
                    specs |= {replace(family_specs[entry], last_finishes_dq=True) for entry in finishing}
                    if limit is None:
                        specs.add(replace(walk, finishes_dq_in_order=True))
                        specs |= of_intervals(family_specs)
                if family == "sm80":
                    for group_size in {1, 2 if limit is None else 1}:
                        split = sm80.split_spec(family_specs["forward"], problem, device, group_size)
                        specs |= {split, sm80.combine_spec(split)}
                if is_first and family in ("sm80", "sm90") and limit is None and dtype in _HALVES:
                    for heads, block in product((4, 16), (16, 32, 64)):  # few heads add to dQ atomically
                        group = Problem.of(ShapeDtype((heads, length, head_dim), dtype), k, v)
                        chosen = FAMILIES[family].union_specs(Request(group, device), block, group.group_size)
                        specs |= set(chosen.values())
    return specs


def of_tangents(family: Family, problem: Problem, device: DeviceSpec, limit: Limit) -> set[KernelSpec]:
    """Return a family's kernels for tangents, and for tangents of gradients."""
    specs = {family.jvp_spec(Request(replace(problem, tangents=names), device, limit)) for names in TANGENTS}
    for names in SECOND_TANGENTS:
        with suppress(UnsupportedProblem):  # no tile fits
            rows, columns = family.backward_jvp_specs(Request(replace(problem, tangents=names), device, limit))
            specs |= {second_statistics_spec(rows), rows, columns}
    return specs


def of_intervals(specs: Mapping[str, KernelSpec]) -> set[KernelSpec]:
    """Return the sm90 kernels that replace those for a band if the work list holds row intervals."""
    names = ("backward", "backward_statistics", "convert_dq")
    adding = {replace(specs[name], is_ordered=name == "backward") for name in names}
    finishing = {replace(spec, last_finishes_dq=True) for spec in adding if spec.entry.name != "convert_dq"}
    ordered = replace(specs["forward"], is_ordered=True)
    walk = specs["backward"]
    is_cut = (walk.block_q, walk.block_kv) == (64, 128)  # only these tiles may end with their sequences
    cut = {replace(spec, cuts_sequences=True) for spec in adding | finishing if is_cut}
    if max(ordered.head_dim, ordered.value_dim) <= max(SHORT_SEQUENCES):
        finishing.add(in_small_tiles(specs["forward"]))
    return adding | finishing | cut | {ordered, replace(ordered, cuts_sequences=True)}


def with_sinks(spec: KernelSpec) -> set[KernelSpec]:
    """Return the kernels that a call with a sink launches in addition to a kernel, or instead of it."""
    if spec.name in ("naive_softmax", "sm90_backward_statistics") and not spec.cuts_sequences:
        specs = {gradient_spec(spec.dtype, spec)}
    else:
        specs = {gradient_spec(spec.dtype), sums_spec(spec.accumulator)} if spec.name == "simt_forward" else set()
    names = ("forward", "combine", "softmax", "jvp", "backward_jvp_statistics")
    takes_it = spec.entry.name in names and not spec.is_split
    takes_it &= spec.family != "fa1"
    return specs | ({replace(spec, has_sink=True)} if takes_it else set())


def of_scores(name: str) -> set[KernelSpec]:
    """Return sm80 or sm90 kernels for a known GPU with score functions and dropout, and simt kernels with a softcap.

    All functions of the library are included. Their slopes are 1, constant or variable, and the gradients of their
    arrays are summed by tile, by score or by table.
    """
    device, specs = DeviceSpec.gpu(name), set()
    heads, slopes = 2, ShapeDtype((2,), np.float32)
    table = np.zeros((heads, 32), np.float32)
    changes: list[dict[str, Any]] = [
        {"softcap": 50.0}, {"softcap": 50.0, "dropout": Dropout(0.1, 1)}, {"dropout": Dropout(0.1, 1)},
        {"score": scores.softcap(50.0, fast=True)}, {"score": scores.alibi(slopes)},
        {"score": scores.temperature(slopes)}, {"score": scores.temperature(slopes), "wrt": "per_head"},
        {"score": scores.relative_position(table, bidirectional=True), "wrt": "table"},
        {"bias": ShapeDtype((heads, 5000, 5000), BFLOAT16), "wrt": "bias"},
    ]  # fmt: skip
    shared = {"bias": ShapeDtype((5000, 5000), BFLOAT16), "wrt": "bias"}
    for dim, options, repeats in product((64, 128), [*changes, shared], (False, True)):
        x = ShapeDtype((heads, 5000, dim), BFLOAT16)
        kernel = "sm90" if device.compute_capability == (9, 0) else "sm80"
        planned = cuflash.plan(
            x, x, x, kernel=kernel, executor="gpu", device=device, deterministic=repeats, **options
        )._plan.specs
        specs |= {planned[entry] for entry in ("forward", "backward")}
        if not repeats:
            named = {"bias"} & options.keys()
            moving = cuflash.plan(
                x, x, x, kernel=kernel, executor="gpu", device=device, tangents=("q", "k", "v", *named), **options
            )
            specs |= {spec for spec in moving._plan.specs.values() if "jvp" in spec.entry.name}
        specs |= {spec for spec in planned.values() if spec.adds_dq_in_order or spec.entry.name == "captured_sums"}
    lists = masks.ChosenBlocks(np.zeros((5000, 1), np.int32), 64)
    for dim, options in product((64, 128), changes[3:5]):
        x = ShapeDtype((heads, 5000, dim), BFLOAT16)
        specs |= set(cuflash.plan(x, x, x, mask=lists, executor="gpu", device=device, **options)._plan.specs.values())
    x = ShapeDtype((heads, 5000, 64), np.dtype(np.float32))
    capped = cuflash.plan(
        x, x, x, kernel="simt", executor="gpu", device=device, softcap=50.0, tangents=("q", "k", "v")
    )._plan.specs
    return specs | {capped[entry] for entry in ("forward", "backward", "jvp")} | of_scored_caches(name, changes)


def of_scored_caches(name: str, changes: Iterable[dict[str, Any]]) -> set[KernelSpec]:
    """Return the cache kernels with these score functions, and those that split keys at fixed positions."""
    device, specs = DeviceSpec.gpu(name), set()
    programs = [
        ScoreKind.of_score(score) for options in changes if "dropout" not in options and "wrt" not in options
        and (score := score_of(options.get("score"), options.get("softcap"), None, np.empty(0))) is not None
    ]  # fmt: skip
    bias = ScoreKind.of_score(scores.bias(ShapeDtype((2, 1000, 1000), BFLOAT16)))
    for dim, kind, rows in product((64, 128, 256), (*programs, bias), (8, 32)):
        q, k = ShapeDtype((1, 2, rows, dim), BFLOAT16), ShapeDtype((1, 1, 1000, dim), BFLOAT16)
        problem = kind.of(Problem.of(q, k, k))
        for is_quantized, part_keys in product((False, True), (None, 256)):
            spec = decode_spec(problem, device, part_keys, is_quantized=is_quantized)
            specs |= {spec, replace(spec, score=problem.score)}
        families = [family for family in PREFILL_FAMILIES if not FAMILIES[family].reasons(problem, device)]
        specs |= {replace(prefill_spec(problem, device, family), score=problem.score) for family in families}
    return specs


def of_caches(name: str) -> set[KernelSpec]:
    """Return the KV-cache kernels for a known GPU: 16-bit and FP8, for few and many rows, with and without a sink."""
    device = DeviceSpec.gpu(name)
    specs = {append_spec(dtype) for dtype in DTYPES if dtype != BFLOAT16 or name != "T4"}
    specs |= {bounds_spec(spec.dtype) for spec in specs}
    specs |= {append_spec(spec.dtype, is_quantized=True) for spec in specs if spec.dtype in UP_TO_FLOAT32}
    for dtype, dim, rows, batch in product(_HALVES, (64, 128, 256), (16, 32, 64), (1, 2, 100)):
        q, k = ShapeDtype((batch, rows, 1, dim), dtype), ShapeDtype((batch, 1, 1000, dim), dtype)
        problem = Problem.of(q, k, k)
        if not FAMILIES["sm80"].reasons(problem, device):
            for is_quantized in (False, True):
                spec = decode_spec(problem, device, is_quantized=is_quantized)
                assert spec.shared_bytes <= device.tile_memory_bytes
                specs |= {spec, replace(spec, has_sink=True)}
                if rows <= 32 or dim <= 128:
                    specs.add(replace(spec, is_chosen=True))
                if rows == 16 and not is_quantized:
                    specs.add(replace(spec, entry=FEW_QUERIES_ENTRY))
        for family in PREFILL_FAMILIES:
            if not FAMILIES[family].reasons(problem, device):
                spec = prefill_spec(problem, device, family)
                of_queries = intervals_spec(dtype)
                specs |= {spec, replace(spec, has_sink=True), of_queries, replace(of_queries, has_sink=True)}
    return specs


def of_fp8() -> set[KernelSpec]:
    """Return the FP8 kernels, all for the H100."""
    device, specs = DeviceSpec.gpu("H100"), set()
    for dtype, dim, length, limit in product(
        (*_HALVES, np.dtype(np.float32)), (64, 128), LENGTHS, (None, (64, 64), (128, 128))
    ):
        x = ShapeDtype((2, length, dim), dtype)
        problem = replace(Problem.of(x, x, x), precision="fp8", rows_per_scale=RowsPerScale(128, 128, 128))
        spec = Sm90Fp8().specs(Request(problem, device, limit))["forward"]
        assert spec.shared_bytes <= device.tile_memory_bytes
        specs |= {spec, replace(spec, has_sink=True)}
    for dtype, dim in product((*_HALVES, np.dtype(np.float32)), (64, 128, 256)):
        specs |= {spec for spec in (quantize_spec(dtype, dim, 128), transpose_spec(dim)) if spec is not None}
    return specs


def every_target() -> list[tuple[KernelSpec, str]]:
    """Return each specification with head_dim = value_dim, and the architecture for which it was chosen."""
    targets = []
    for chip in CHIPS:
        specs = every_spec(chip, zip(DIMS, DIMS)) | of_caches(chip) | (of_fp8() if chip == "H100" else set())
        for spec in sorted(specs.union(*map(with_sinks, specs)), key=str):
            with suppress(UnsupportedProblem):  # the chip lacks the family or its instructions
                targets.append((spec, room.architecture(spec, DeviceSpec.gpu(chip).compute_capability)))
        capability = DeviceSpec.gpu(chip).compute_capability
        if chip in ("A100", "H100"):
            of_chip = sorted(of_scores(chip), key=lambda spec: (str(spec), str(spec.score), spec.score_wrt))
            targets += [(spec, room.architecture(spec, capability)) for spec in of_chip]
        others = {*LIST_SPECS.values(), *INTERVAL_SPECS.values(), UNIONS, *COLUMN_SPECS.values()}
        others |= every_selection_spec(DTYPES) | every_page_spec(DTYPES)
        others |= every_query_spec(DTYPES) if capability >= (8, 0) else set()
        others |= every_result_spec(DTYPES)
        targets += [(spec, room.architecture(spec, capability)) for spec in sorted(others, key=str)]
    return targets


def published() -> list[tuple[KernelSpec, str]]:
    """Return the Hopper kernels of plain attention, whose speed the pages publish."""
    device, targets = DeviceSpec.gpu("H100"), []
    for dim in (64, 128):
        x = ShapeDtype((32, 8192, dim), BFLOAT16)
        specs = cuflash.plan(x, x, x, executor="gpu", device=device)._plan.specs
        targets += [(specs[name], room.architecture(specs[name], (9, 0))) for name in ("forward", "backward")]
    return targets


def chosen(targets: list[tuple[KernelSpec, str]]) -> list[tuple[KernelSpec, str]]:
    """Return all targets in the long profile, otherwise the published ones and few others that together cover as much.

    The next target is always the one that adds the most coverage per compile time.
    """
    if is_long():
        return targets
    always = published()

    def gain(number: int) -> float:
        spec, _ = targets[number]
        return len(covers(targets[number]) - covered) / effort(spec) ** 0.5

    # The gain of a target never grows: the top of the heap is the best if its gain has not fallen.
    selected, covered = [], set[tuple[str, ...]]().union(*map(covers, always))
    heap = [(-gain(number), number) for number in range(len(targets))]
    heapq.heapify(heap)
    while heap:
        before, number = heapq.heappop(heap)
        if gain(number) == -before:
            selected.append(targets[number])
            covered |= covers(targets[number])
        elif gain(number) > 0:
            heapq.heappush(heap, (-gain(number), number))
    return sorted({*needed([*always, *selected]), *always}, key=str)


def effort(spec: KernelSpec) -> float:
    """Estimate the relative compile time of a kernel from its tiles' elements, its gradients and its score function."""
    elements = spec.block_q * (spec.block_kv + spec.value_dim) / spec.num_threads
    operations = 0 if spec.score is None else len(spec.score.instructions)
    gradients = 2 if spec.entry.name.startswith("backward") and spec.entry.name != "backward_statistics" else 1
    return 50 + gradients * (elements + spec.head_dim + spec.value_dim) * (1 + operations / 5)


def needed(targets: list[tuple[KernelSpec, str]]) -> list[tuple[KernelSpec, str]]:
    """Return targets without those that are fully covered by others; the slowest to compile are removed first."""
    times = Counter(each for target in targets for each in covers(target))
    needs = []
    for target in sorted(targets, key=lambda target: -effort(target[0])):
        if min(times[each] for each in covers(target)) > 1:
            times.subtract(covers(target))
        else:
            needs.append(target)
    return needs


COVERED = {field.name for field in fields(KernelSpec)} - SIZES_OF_TILES
BASELINES = ("naive", "fa1")  # families that are not tuned: a short run compiles their kernels for any chip
# `covers` groups the values of these fields, and names the entry
COVERED -= {"entry", "head_dim", "value_dim", "score", "score_wrt", "dtype"}


@cache
def covers(target: tuple[KernelSpec, str]) -> set[tuple[str, ...]]:
    """Return what a target covers: its kernel and architecture, and its fields and width of heads in a pass."""
    spec, architecture = target
    place = spec.family, "gradients" if spec.entry.name.startswith("backward") else "results"
    # How gradients of captured arrays are summed is shared code: one family with each way of it suffices.
    each = {(*place[name.startswith("score_"):], name, str(getattr(spec, name))) for name in COVERED}
    kind = "16 bits" if spec.dtype in _HALVES else spec.dtype.name
    each |= {(*place, "dtype", kind), (spec.family, "dtype", spec.dtype.name)}
    width = next((str(width) for width in (64, 128, 256) if spec.head_dim <= width), "")
    each |= {(*place, "width", width), (*place, "score", str(spec.score is not None))}
    return {(spec.name,), (spec.family, architecture if spec.family not in BASELINES else ""), *each}


def faults(compiled: Compiled) -> list[str]:
    """Return the reasons why a compiled kernel fails the gate."""
    lines = [f"advice: {line}" for line in compiled.advisories]
    spec = compiled.spec
    name = spec.name + " watched" * spec.has_watchdog + " scored" * (spec.score is not None)
    name += " dropped" * spec.has_dropout
    name += " in pages" * (spec.score is not None and spec.is_paged) + " in fixed parts" * bool(spec.part_keys)
    name += " of chosen blocks" * spec.is_chosen
    known = SPILLS.get((name, spec.dtype, spec.head_dim), 0)
    if spec.has_sink:
        known = SPILLS.get((f"{name} with a sink", spec.dtype, spec.head_dim), known)
    if (compiled.resources.spill_bytes or 0) > known:
        lines.append(f"spills {compiled.resources.spill_bytes} bytes")
    if compiled.resources.stack_bytes > known:
        lines.append(
            f"has a stack of {compiled.resources.stack_bytes} bytes: an array is indexed at run time, or spilled"
        )
    return lines


TARGETS = every_target()
CHOSEN = chosen(TARGETS)


def test_the_number_of_specifications_is_bounded(record_property: Callable[[str, object], None]) -> None:
    sides = (None, (16, 16), (24, 24), (32, 32), (64, 64), (16, 64), (64, 16))
    of_chip = {chip: every_spec(chip, product(DIMS, DIMS), sides) for chip in (CHIPS if is_long() else ("H100",))}
    every, one_gpu = set().union(*of_chip.values()), of_chip["H100"]
    print(f"{len(every)} specifications on all chips, {len(one_gpu)} on one; {len(TARGETS)} in the long profile")
    record_property("specifications", len(every))
    assert len(every) <= MOST_SPECS and len(one_gpu) <= MOST_SPECS_OF_A_GPU


def test_the_choice_has_every_kernel_and_every_architecture() -> None:
    assert set().union(*map(covers, CHOSEN)) == set().union(*map(covers, TARGETS))
    assert {name for _, name in CHOSEN} == {name for _, name in TARGETS}
    on_disk = {f"{path.parent.name}_{path.stem}" for path in sources.KERNELS.glob("*/*.cu")}
    assert {spec.name for spec, _ in TARGETS} == on_disk


def test_float64_is_multiplied_on_tensor_cores_where_a_chip_has_them() -> None:
    by_chip = {chip: every_spec(chip, [(64, 64)], (None, (32, 32))) for chip in CHIPS}
    rows = {"T4": 0, "H100": 16} | dict.fromkeys(("A100", "RTX 3090", "L4", "B200", "RTX 5090"), 8)
    for chip, specs in by_chip.items():
        # Statistics have no products, and block masses are multiplied and summed without tensor cores.
        products = {spec for spec in specs if not spec.entry.name.endswith(("statistics", "block_mass"))}
        assert {spec.mma_rows for spec in products if spec.dtype == np.float64} == {rows[chip]}
        assert {spec.mma_rows for spec in specs if spec.dtype != np.float64} == {0}
    in_short_blocks = every_spec("H100", [(64, 64)], ((16, 16), (24, 24)))
    assert {spec.mma_rows for spec in in_short_blocks} == {0}


SIDES = (16, 32, 64, 128)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_warps_share_the_products_of_gradients_and_registers_hold_their_sums(precision: str) -> None:
    for chip, dims, limit in product(("H100", "L4"), product(DIMS, DIMS), (None, *product(SIDES, SIDES))):
        spec = gradients(precision, dims, limit, chip)
        head_dim, value_dim, block_q, block_kv = spec.head_dim, spec.value_dim, spec.block_q, spec.block_kv
        for rows, columns in ((block_q, head_dim), (block_kv, head_dim), (block_kv, value_dim)):
            assert sm80.can_partition(rows, columns, spec.num_warps), str(spec)
        sums = block_kv * (2 * block_q + head_dim + value_dim) / spec.num_threads
        assert sums <= {"ieee": 208, "tf32": 192, "tf32x3": 144}[precision], str(spec)


def every_operation(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return a score computed with all operations that can be traced."""
    arguments: dict[str, list[tuple[Any, ...]]] = {
        "number": [(s, 0.5 * j), (i - j, i)], "real": [(s, 0.5 * j)], "whole": [(i, 3)], "comparison": [(s, j), (i, j)],
        "logical": [(s < 0, i < j)], "test": [(s,)], "choice": [(i < j, s, j)],
    }  # fmt: skip
    for each in PRIMITIVES.values():
        for args in arguments[each.signature] if each.traced != () else ():
            x = each.value(*args[: each.cuda.count("{}")])
            s = s + (np.where(x, 1.5, s) if each.signature in ("comparison", "logical", "test") else x)
    return s


@pytest.mark.parametrize(
    ("kernel", "entry", "dtype"),
    [("naive", "scores", "f4"), ("naive", "gradient_scores", "f4"), ("simt", "forward", "f8")],
)
def test_every_operation_of_score_functions_compiles(kernel: Any, entry: str, dtype: str) -> None:
    x, device = ShapeDtype((2, 50, 8), np.dtype(dtype)), DeviceSpec.gpu("H100")
    score = cuflash.scores.Score(every_operation)
    mask = masks.BlockPattern(np.ones((4, 4), bool), 16)  # for a small tile, which compiles in a second
    plan = cuflash.plan(x, x, x, kernel=kernel, executor="gpu", device=device, score=score, mask=mask)
    assert room.cubin(plan._plan.specs[entry], "sm_90").code.startswith(b"\x7fELF")


FLAT_OR_WIDE = (
    ("ieee", (96, 96), (16, 128)), ("ieee", (96, 96), (32, 128)), ("ieee", (32, 192), (16, 64)),
    ("tf32", (96, 96), (16, 64)), ("tf32", (96, 192), None), ("tf32", (32, 256), None),
    ("tf32x3", (96, 96), (16, 64)), ("tf32x3", (192, 192), (16, 64)), ("tf32x3", (96, 192), None),
)  # fmt: skip


@pytest.mark.parametrize(("precision", "dims", "limit"), FLAT_OR_WIDE[:: 1 if is_long() else 8])
def test_gradients_of_few_warps_and_wide_rows_do_not_spill(precision: str, dims: tuple[int, int], limit: Limit) -> None:
    """Flat blocks of a list, and rows of 96, leave few threads for many sums: such kernels spilled up to 5750 bytes."""
    assert faults(room.cubin(gradients(precision, dims, limit), "sm_90")) == []


def gradients(precision: str, dims: tuple[int, int], limit: Limit, chip: str = "H100") -> KernelSpec:
    dtype = BFLOAT16 if precision == "ieee" else np.dtype(np.float32)
    q, v = (ShapeDtype((2, 1000, dim), dtype) for dim in dims)
    request = Request(Problem.of(q, q, v, precision=precision), DeviceSpec.gpu(chip), limit)
    return FAMILIES["sm80"].specs(request)["backward"]


@pytest.mark.parametrize(("spec", "architecture"), CHOSEN, ids=[f"{spec}, {name}" for spec, name in CHOSEN])
def test_a_kernel_compiles_without_a_spill_or_advice(nvrtc: Any, spec: KernelSpec, architecture: str) -> None:
    compiled = room.cubin(spec, architecture)
    print(compiled)
    assert faults(compiled) == []


@pytest.mark.parametrize("dim", [64, 128, 256] if is_long() else [128])
def test_hopper_s_small_tiles_of_lists_do_not_spill_either(nvrtc: Any, dim: int) -> None:
    """Several blocks share a multiprocessor's registers, which each kernel redistributes among its warpgroups."""
    x = ShapeDtype((2, 4096, dim), BFLOAT16)
    spec = FAMILIES["sm90"].specs(Request(Problem.of(x, x, x), DeviceSpec.gpu("H100"), (64, 64)))["forward"]
    assert (spec.block_q, spec.min_blocks) == (64, {64: 3, 128: 2, 256: 1}[dim])
    assert faults(room.cubin(spec, "sm_90a")) == []


@pytest.mark.parametrize("dims", [(128, 128), *([(256, 256), (64, 64), (192, 128)] if is_long() else [])])
def test_hopper_s_gradients_of_lists_do_not_spill_either(nvrtc: Any, dims: tuple[int, int]) -> None:
    """Walking a list and finding the block that finishes dQ must fit in the 24 registers of a producer thread."""
    q, v = (ShapeDtype((2, 4096, dim), BFLOAT16) for dim in dims)
    family_specs = FAMILIES["sm90"].specs(Request(Problem.of(q, q, v), DeviceSpec.gpu("H100"), (128, 128)))
    specs = [family_specs["backward"]]
    if max(dims) <= 128:
        specs += [replace(family_specs[entry], last_finishes_dq=True) for entry in ("backward", "backward_statistics")]
    for spec in specs:
        assert spec.family == "sm90" and spec.is_listed
        assert faults(room.cubin(spec, "sm_90a")) == []


@pytest.mark.parametrize("entry", ["forward", "backward"] if is_long() else ["backward"])
def test_a_watched_kernel_is_the_same_but_for_its_waits(nvrtc: Any, entry: str) -> None:
    """Products stay in flight: ptxas would serialize them if a wait contained a trap, since a trap exits the kernel."""
    x = ShapeDtype((2, 4096, 128), np.float16)
    spec = FAMILIES["sm90"].specs(Request(Problem.of(x, x, x), DeviceSpec.gpu("H100")))[entry]
    plain, watched = (room.cubin(replace(spec, has_watchdog=each), "sm_90a") for each in (False, True))
    assert faults(watched) == [] and watched.code != plain.code
    assert watched.resources.registers == plain.resources.registers


# The gate itself, on kernels that are written to pass or to fail.


@pytest.mark.parametrize("chip", CHIPS)
def test_a_good_kernel_passes_on_every_chip(
    nvrtc: Any, kernels: Path, spec: Callable[..., KernelSpec], chip: str
) -> None:
    capability = DeviceSpec.gpu(chip).compute_capability
    assert faults(room.cubin(spec("plain"), room.architecture(spec("plain"), capability))) == []


@pytest.mark.parametrize(
    ("family", "entry", "architecture", "words"),
    [
        ("simt", "spills", "sm_90", "spills"),
        ("simt", "spills", "sm_75", "spills"),
        ("sm90", "serialised", "sm_90a", "C75"),
    ],
)
def test_a_bad_kernel_does_not_pass(
    nvrtc: Any, kernels: Path, spec: Callable[..., KernelSpec], family: str, entry: str, architecture: str, words: str
) -> None:
    assert any(words in fault for fault in faults(room.cubin(spec(entry, family=family), architecture)))
