"""Kernel texts are complete and reproducible, and their lines map to files; kernels_cu/ keeps its folders' rules."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuflash import DeviceSpec, ShapeDtype, sim
from cuflash.errors import CompileError
from cuflash.compiler import params_layout as records
from cuflash.compiler import nvrtc as compiling
from cuflash.compiler import source as room
from cuflash.planning.decoding import decode_spec
from cuflash.planning.families.family import Request
from cuflash.planning.families.sm80 import combine_spec
from cuflash.planning.families.sm90_fp8 import Sm90Fp8
from cuflash.planning.problem import Problem
from cuflash.planning.routing import FAMILIES, mass_kernel
from cuflash.planning.scales import RowsPerScale
from cuflash.planning.spec import Entry, KernelSpec
from cuflash.scores import Score
from cuflash.scores.program import derived
from executors import needs_compiler

Make = Callable[..., KernelSpec]
BIAS = Score(lambda s, b, h, i, j, x: s + x[h, i, j], x=np.ones((2, 3, 8), np.float16))
BIASED: dict[str, Any] = {"score": derived(BIAS.program, ("x",)), "score_wrt": ("x",)}
TABLE = Score(lambda s, b, h, i, j, x: s + x[h, np.clip(j - i, 0, 3)], x=np.ones((3, 4), np.float32))
BINNED: dict[str, Any] = {"score": derived(TABLE.program, ("x",)), "score_wrt": ("x",)}
CAPPED = Score(lambda s, b, h, i, j, slope: 2 * np.tanh(s) * slope[h], slope=np.ones(3, np.float32))
CHANGED = {
    "family": Entry(family="sm90", name="plain"),
    "entry": Entry(family="simt", name="spills"),
    "dtype": np.dtype(np.float64),
    "head_dim": 128,
    "value_dim": 128,
    "block_q": 64,
    "block_kv": 64,
    "num_warps": 8,
    "min_blocks": 1,
    "is_listed": True,
    "num_stages": 2,
    "dq_atomic_width": 4,
    "finishes_dq_in_order": True,
    "last_finishes_dq": True,
    "adds_dq_in_order": True,
    "is_ordered": True,
    "cuts_sequences": True,
    "mma_rows": 8,
    "is_split": True,
    "packs_queries": True,
    "pack_gqa": True,
    "precision": "tf32",
    "has_watchdog": True,
    "has_sink": True,
    "has_dropout": True,
    "reads_dropout_seed": True, "dropout_is_placed": True, "is_paged": True, "part_keys": 64,
    "is_quantized": True, "splits_head_dim": True,
    "score": CAPPED.program,
    "score_wrt": ("slope",),
    "score_sums": ("exact",),
    "score_is_staged": True, "score_is_stored": True, "score_bins": 4,
    "score_takes_products": True, "score_is_placed": True, "is_chosen": True, "tangents": ("q",),
}


# Texts.


def test_equal_specifications_give_equal_texts(kernels: Path, spec: Make) -> None:
    first = room.source(spec("plain"))
    room.source.cache_clear()
    assert room.source(spec("plain")) == first and spec("plain") == spec("plain")


@pytest.mark.parametrize("field", ("family", *KernelSpec.__slots__))
def test_every_field_changes_the_text(kernels: Path, spec: Make, field: str) -> None:
    shutil.copy(kernels / "simt" / "plain.cu", kernels / "sm90" / "plain.cu")
    scored = {"score": CAPPED.program}
    others = {
        "score_wrt": scored, "score_sums": {**scored, "score_wrt": ("slope",)}, "score_is_staged": BIASED,
        "score_is_stored": {**BIASED, "score_is_staged": True}, "score_bins": BINNED,
        "score_takes_products": scored, "score_is_placed": scored,
    }.get(field, {})  # fmt: skip
    plain = spec("plain", **others)
    changed = replace(plain, **{"entry" if field == "family" else field: CHANGED[field]})
    assert room.source(changed) != room.source(plain)


def test_a_changed_header_changes_the_text(kernels: Path, spec: Make) -> None:
    before = room.source(spec("plain"))
    with (kernels / "attention" / "params.cuh").open("a") as header:
        header.write("// changed\n")
    room.source.cache_clear()  # as in a new process
    assert room.source(spec("plain")) != before


def _write(kernels: Path, **files: str) -> None:
    for name, text in files.items():
        (kernels / "simt" / f"{name}.cu").write_text(text)


def test_each_file_comes_once_however_often_it_is_included(kernels: Path) -> None:
    (kernels / "tile").mkdir(exist_ok=True)
    (kernels / "tile" / "a.cuh").write_text("#pragma once\n#include <ptx/types.cuh>\n#include <tile/b.cuh>\n")
    (kernels / "tile" / "b.cuh").write_text("#pragma once\n#include <tile/a.cuh>\n#include <ptx/types.cuh>\n")
    _write(kernels, diamond="#include <tile/b.cuh>\n  #  include  <tile/a.cuh>  // again\n#include <tile/b.cuh>\n")
    text = room.flatten("simt/diamond.cu")
    starts = re.findall(r'#line 1 "kernels_cu/(.*)"', text)
    assert sorted(starts) == ["ptx/types.cuh", "simt/diamond.cu", "tile/a.cuh", "tile/b.cuh"]
    assert "#include" not in text and "#  include" not in text and "#pragma once" not in text


@pytest.mark.parametrize(
    "line",
    [
        "#include <cuda_fp16.h>",
        '#include "ptx/types.cuh"',
        "#include <stdint.h>",
        "#include <ptx/../../secret.cuh>",
        "#include </etc/passwd>",
        "#include <simt/plain.cu>",
        "# include<tile/Upper.cuh>",
        "#include HEADER",
        "#include_next <ptx/types.cuh>",
    ],
)
def test_an_include_of_something_else_is_refused_with_its_line(kernels: Path, line: str) -> None:
    _write(kernels, stray=f"int x;\n{line}\n")
    with pytest.raises(ValueError, match=r"kernels_cu/simt/stray.cu:2 must include files of kernels_cu/"):
        room.flatten("simt/stray.cu")


# Lines map to our files. `$` marks where the fault is inserted.

ENTRY = "// first line\n{before}\n#include <attention/outer.cuh>\n{after}\n"
OUTER = "#pragma once\n#include <attention/inner.cuh>\n\n{outer}\n"
INNER = "#pragma once\n\n\n{inner}\n"
PLACES = {
    "before": ("simt/fault.cu", 2),
    "after": ("simt/fault.cu", 4),
    "outer": ("attention/outer.cuh", 4),
    "inner": ("attention/inner.cuh", 4),
}


def _broken(kernels: Path, place: str) -> tuple[str, int]:
    faults = dict.fromkeys(PLACES, "") | {place: "constexpr int fault = no_such_name;"}
    _write(kernels, fault=ENTRY.format(**faults))
    (kernels / "attention" / "outer.cuh").write_text(OUTER.format(**faults))
    (kernels / "attention" / "inner.cuh").write_text(INNER.format(**faults))
    return PLACES[place]


def _host_compiler(text: str, standard: str) -> str:
    """Return g++'s messages about a text that uses no CUDA keywords; empty if it compiles."""
    path = shutil.which("g++")
    if path is None:
        pytest.skip("no g++: apt install g++")
    command = [path, "-fsyntax-only", f"-std={standard}", "-Wall", "-Wextra", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60).stderr


@pytest.mark.parametrize("place", PLACES)
def test_gcc_names_our_file_and_line(kernels: Path, spec: Make, place: str) -> None:
    file, line = _broken(kernels, place)
    # The text has float elements, so the stubs for 16-bit types are irrelevant.
    assert f"kernels_cu/{file}:{line}:" in _host_compiler(room.source(spec("fault")), "c++17")


@pytest.mark.parametrize("place", PLACES)
def test_nvrtc_names_our_file_and_line(nvrtc: Any, kernels: Path, spec: Make, place: str) -> None:
    file, line = _broken(kernels, place)
    with pytest.raises(CompileError, match=rf"kernels_cu/{re.escape(file)}\({line}\): error"):
        compiling.cubin(spec("fault"), "sm_90")


# The params record.

PARAMS = ["attention/params.cuh"]


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_the_records_are_laid_out_as_their_twins(standard: str) -> None:
    text = room.flatten("attention/params.cuh")
    assert _host_compiler(text + records.assertions(PARAMS, host=True), standard) == ""


@pytest.mark.parametrize("which", [0, -1], ids=["offset", "size"])
def test_each_wrong_number_stops_the_compiler(which: int) -> None:
    lines = records.assertions(PARAMS, host=True).splitlines()
    members = [re.findall('"(.*)"', line)[0] for line in lines if "static_assert" in line]
    for number, line in enumerate(lines):
        equals = re.findall(r"== \d+", line)
        if equals:
            before, literal, after = line.partition(equals[which]) if which == 0 else line.rpartition(equals[which])
            lines[number] = f"{before}{literal}1{after}"  # adds a digit
    said = _host_compiler(room.flatten("attention/params.cuh") + "\n".join(lines), "c++17")
    assert re.findall(r"static assertion failed: (.*)", said) == members != []


def test_nvrtc_and_gcc_are_asked_the_same() -> None:
    def facts(text: str) -> list[tuple[str, ...]]:
        return re.findall(r'== (\d+)(?: && sizeof\((.*)\) == (\d+))?, "(.*)"', text)

    of_nvrtc, of_host = (records.assertions(PARAMS, host=host) for host in (False, True))
    assert facts(of_nvrtc) == facts(of_host) != []


# Shared memory.


def launched() -> list[KernelSpec]:
    """Return the specifications of a problem's kernels in every family, with FP8, split-KV, caches and block masses."""
    chip, shared = DeviceSpec.gpu("H100"), []
    for dtype in (np.float16, np.float32, np.float64):
        problem = Problem.of(*[ShapeDtype((1, 4, 300, 64), np.dtype(dtype))] * 3)
        for family in FAMILIES.values():
            if not family.reasons(problem, chip):
                for deterministic in (False, True):
                    shared += family.specs(Request(problem, chip, None, deterministic)).values()
    half = Problem.of(*[ShapeDtype((1, 4, 300, 192), np.dtype(np.float16))] * 3)
    shared += FAMILIES["sm90"].specs(Request(half, chip)).values()
    shared += [mass_kernel(Request(half, DeviceSpec.gpu(name)), 64) for name in ("T4", "A100", "H100")]
    shared.append(combine_spec(FAMILIES["sm80"].specs(Request(half, chip))["forward"]))
    few = Problem.of(ShapeDtype((1, 4, 2, 64), np.dtype(np.float16)), *[ShapeDtype((1, 4, 300, 64), half.dtype)] * 2)
    shared += [decode_spec(few, chip, is_quantized=is_quantized) for is_quantized in (False, True)]
    rows = RowsPerScale(128, 128, 128)
    quantized = replace(Problem.of(*[ShapeDtype((1, 4, 300, 64), np.dtype(np.float16))] * 3), rows_per_scale=rows)
    return list(dict.fromkeys([*shared, *Sm90Fp8().specs(Request(quantized, chip)).values()]))


@pytest.mark.parametrize("spec", launched(), ids=lambda spec: f"{spec.name}-{spec.dtype}-{spec.head_dim}")
def test_kernels_state_the_shared_memory_that_their_launches_ask_for(spec: KernelSpec) -> None:
    """The compiler compares both numbers; kernels without dynamic shared memory declare none."""
    stated = re.findall(r"static_assert\(cuflash::\w+::kSharedBytes == (\d+)", room.source(spec))
    num_bytes = spec.shared_bytes
    assert stated == ([str(num_bytes)] if num_bytes else [])


@needs_compiler
@pytest.mark.parametrize("entry", ["forward", "backward"])
@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
def test_launches_that_ask_for_less_shared_memory_stop_the_compiler(family: str, entry: str) -> None:
    dtype = np.dtype(np.float32 if family == "simt" else np.float16)
    problem = Problem.of(*[ShapeDtype((1, 1, 300, 64), dtype)] * 3)
    spec = FAMILIES[family].specs(Request(problem, DeviceSpec.gpu("H100")))[entry]
    num_bytes = spec.shared_bytes
    spec = replace(spec, entry=replace(spec.entry, shared_bytes=lambda _: num_bytes - 8))
    with pytest.raises(sim.BuildError, match=f"launches ask for {num_bytes - 8} bytes of shared memory"):
        sim.build(room.source.__wrapped__(spec, host=True), spec.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_refuses_dtypes_that_it_does_not_name(family: str) -> None:
    known = Problem.of(*[ShapeDtype((1, 4, 300, 64), np.dtype(np.float16))] * 3)
    problem = replace(known, dtype=np.dtype(ml_dtypes.float8_e5m2))
    (reason,) = FAMILIES[family].reasons(problem, DeviceSpec.gpu("H100"))
    assert reason.startswith(f"kernel='{family}' takes float16 or") and "got float8_e5m2" in reason


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_refuses_a_dtype_names_only_families_that_take_it(family: str, dtype: Any) -> None:
    known = Problem.of(*[ShapeDtype((1, 4, 300, 64), np.dtype(np.float16))] * 3)
    problem = replace(known, dtype=np.dtype(dtype))
    for reason in FAMILIES[family].reasons(problem, None):
        advised = re.findall(r"kernel='(\w+)'", reason)[1:]  # without the kernel's own name, which comes first
        assert advised == ([] if FAMILIES["simt"].reasons(problem, None) else ["simt"])


# The files of kernels_cu/.

# each folder may include itself and those to its left; entry files may include all
ORDER = ("ptx", "tile", "attention")
ENTRIES = "entries"
MAY_INCLUDE = {"attention": {"attention", "tile", "ptx/math.cuh", "ptx/types.cuh"}}
WORDS = {
    "ptx": {"threadIdx", "blockIdx", "softmax", "head", "seqlen", "query", "key"},
    "tile": {"asm", "softmax", "mask", "head", "blockIdx"},
    "attention": {"asm", "lane", "swizzle", "blockIdx"},
    ENTRIES: {"asm"},
}
EXCEPT = {"attention/tile_scheduler.cuh": {"blockIdx"}}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def rules(path: str, text: str) -> Iterator[str]:
    """Yield the rules of its folder that a file of kernels_cu/ breaks."""
    room_of = path.partition("/")[0]
    kind = room_of if room_of in ORDER else ENTRIES
    if (kind != ENTRIES and not path.endswith(".cuh")) or not re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+\.cuh?", path):
        yield "only families hold .cu files, and all names are in small letters"
    if not text.isascii():
        yield "holds a letter that is not ASCII"
    code = _COMMENT.sub(lambda actual: "\n" * actual[0].count("\n"), text)
    for line in code.splitlines():
        yield from _directive_rules(path, kind, line.strip())
    for name in set(re.findall(r"\w+", code)):
        parts = {name, *re.findall(r"[A-Z]?[a-z0-9]+", name)}
        yield from (
            f"speaks of {word}"
            for word in WORDS[kind] - EXCEPT.get(path, set())
            if parts & {word, f"{word}s", word.capitalize(), f"__{word}__", f"{word.capitalize()}s"}
        )
    if path.endswith(".cuh") and "#pragma once" not in text.splitlines():
        yield "has no #pragma once"


def _directive_rules(path: str, kind: str, line: str) -> Iterator[str]:
    if not line.startswith("#"):
        return
    include = re.fullmatch(r"#include <((\w+)/\w+\.cuh)>", line)
    if include:
        own = {*ORDER, path.partition("/")[0]}  # headers shared by a family's entry files are in its folder
        allowed = MAY_INCLUDE.get(kind, own if kind == ENTRIES else set(ORDER[: ORDER.index(kind) + 1]))
        if not {include[1], include[2]} & allowed:
            yield f"includes {include[1]}"
    elif line != "#pragma once" and not re.fullmatch(r"#pragma unroll( \d+| kUnroll)?", line):
        if path != "ptx/types.cuh" or line != "#define CUFLASH_DEVICE __device__ __forceinline__":
            yield f"has the directive {line}"


FILES = sorted(path.relative_to(room.KERNELS).as_posix() for path in room.KERNELS.rglob("*.cu*"))


@pytest.mark.parametrize("path", FILES)
def test_every_cuda_file_keeps_the_rules(path: str) -> None:
    assert list(rules(path, (room.KERNELS / path).read_text("utf-8"))) == []


PLANTED = {
    ("tile/a.cuh", 'asm volatile("");'): "speaks of asm",
    ("ptx/a.cuh", "#if __CUDA_ARCH__ > 800"): "has the directive #if __CUDA_ARCH__ > 800",
    ("tile/a.cuh", "#define X 1"): "has the directive #define X 1",
    ("simt/a.cu", "#include <cuda_fp16.h>"): "has the directive #include <cuda_fp16.h>",
    ("simt/a.cu", '#include "tile/a.cuh"'): 'has the directive #include "tile/a.cuh"',
    ("tile/a.cuh", "#include <attention/b.cuh>"): "includes attention/b.cuh",
    ("attention/a.cuh", "#include <ptx/mma.cuh>"): "includes ptx/mma.cuh",
    ("simt/a.cu", "#include <sm80/b.cuh>"): "includes sm80/b.cuh",
    ("ptx/a.cuh", "int i = threadIdx.x;"): "speaks of threadIdx",
    ("tile/a.cuh", "int head_dim;"): "speaks of head",
    ("tile/a.cuh", "struct OnlineSoftmax {};"): "speaks of softmax",
    ("attention/a.cuh", "int x = blockIdx.x;"): "speaks of blockIdx",
    ("attention/a.cuh", "constexpr int kSwizzle = 3;"): "speaks of swizzle",
    ("attention/a.cu", ""): "only families hold .cu files, and all names are in small letters",
    ("simt/a.cuh", "int x;"): "has no #pragma once",
    ("tile/a.cuh", "// caf\u00e9"): "holds a letter that is not ASCII",
}  # fmt: skip


@pytest.mark.parametrize(("path", "text"), PLANTED)
def test_a_planted_violation_is_caught(path: str, text: str) -> None:
    assert PLANTED[path, text] in list(rules(path, text))
