"""Does a change of names or files leave the machine code of all kernels unchanged?

    python -m experiments same_machine_code main                       # every kernel, against a commit or branch
    python -m experiments same_machine_code main --quick               # a few kernels that cover everything once
    python -m experiments same_machine_code main --families sm90 --architectures sm_90a
    python -m experiments same_machine_code main --renamed is_packed=pack_gqa,sm90_convert_dq=sm80_convert_dq

Both trees, the working tree and the commit BASE, list their kernels: all that the compile gate
(tests/kernels/test_kernels_compile.py) lists, and those of `LISTED`, `UNEQUAL` and `WATCHED`, which the gate does not
list. For each kernel, the text and the options that the library would pass to NVRTC are compiled; no GPU is needed.
Kernels are matched by specification and architecture, and compared function by function: instructions, relocations,
constants, registers, stack, static shared memory, barriers and other ptxas attributes (`cubin.functions`), and the
dynamic shared memory of a launch. Names, line numbers, debug information, and fields of a specification that only one
tree has are ignored; `--renamed` gives the new names of BASE's fields and kernels.

Kernels whose texts differ only in comments, white space and line numbers are not compiled, because their machine code
is equal. Functions of other kernels are stored in `--cache` by text and options, so that a tree is compiled once. With
an empty cache, a tree in which all texts differ takes 70 minutes on one core. `--quick` compares few kernels of sm_80,
sm_90 and sm_90a: each kernel with each architecture, each value of each field, each pair of dimensions, each tile and
each combination of flags at least once.

Expect: "the same machine code" and exit status 0; otherwise every difference and exit status 1.
Found:  no result is stored: each run lists the kernels whose code differs, and ends with status 1 if there are any.

Cost: Seconds if only comments differ; with --quick, 5 minutes on two cores for a family in which all texts differ.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import heapq
import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import cubin
from cuflash.planning.spec import KernelSpec

ROOT = Path(__file__).resolve().parents[2]
GATE = "test_kernels_compile.py"
CACHE = Path(tempfile.gettempdir()) / "cuflash_machine_code"
QUICK_ARCHITECTURES = ("sm_80", "sm_90", "sm_90a")
MOST_SHOWN = 40  # maximum number of differences shown on the terminal; --json writes all of them

# Kernels that the gate lacks: with lists, with unequal dimensions, and with watchdogs.
ARCHITECTURES = {"T4": "sm_75", "A100": "sm_80", "H100": "sm_90"}
# chips, head dimensions, blocks
LISTED = (("T4", "A100", "H100"), ((64, 64), (128, 128)), ((16, 64), (64, 64), (128, 128)))
UNEQUAL = (("H100",), ((192, 128), (64, 128)), (None, (128, 128)))
WATCHED = (64, 128, 256)  # head_dim of kernels of the sm90 family in float16
# alternatives, in order of preference, since trees may have either field
WATCHED_FIELDS = ("is_watched", "has_watchdog")
DEFAULTS = {field.name: str(field.default) for field in fields(KernelSpec)}  # default values of the fields in this tree


class Kernel(NamedTuple):
    """A kernel for an architecture, and the fields of its specification as text."""

    name: str  # family_entry
    architecture: str
    specification: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return " ".join([self.architecture, self.name, *(f"{name} {value}" for name, value in self.specification)])


class Given(NamedTuple):
    """The text and options that the library passes to NVRTC for a kernel, and the resources of its launch.

    The name of the text's file is a digest of everything that affects the machine code: texts that differ only in
    comments have the same name.
    """

    text: Path
    options: tuple[str, ...]
    launch_shared_bytes: int | None

    def code(self) -> tuple[str, tuple[str, ...]]:
        """Return a key of the machine code: kernels of two trees with equal texts and options have equal keys."""
        return self.text.name, self.options


class Difference(NamedTuple):
    """A field of a function that differs between the two trees."""

    kernel: str
    function: str
    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.function}: {self.field}: {self.before} -> {self.after}"


# Kernels that a tree would compile. This part runs in one process per tree, which imports that tree's library.


def specifications(gate: Mapping[str, Any]) -> set[tuple[Any, str]]:
    """Return the specifications to compare, each with its architecture, from the globals of a tree's compile test."""
    pairs = set(gate["every_target"]())
    for chips, dims, blocks in (LISTED, UNEQUAL):
        for chip in chips:
            architecture = ARCHITECTURES[chip]
            for spec in gate["every_spec"](chip, dims, blocks):
                if spec.family == "sm90" and chip == "H100":
                    pairs.add((spec, architecture + "a"))
                elif spec.family in ("simt", "naive") or spec.family == "sm80" and chip != "T4":
                    pairs.add((spec, architecture))
    for spec, architecture in list(pairs):
        watched = [field.name for field in fields(spec) if field.name in WATCHED_FIELDS]
        if watched and spec.family == "sm90" and str(spec.dtype) == "float16" and spec.head_dim in WATCHED:
            pairs.add((replace(spec, **{watched[0]: True}), architecture))
    return pairs


def by_kernel(root: Path) -> tuple[dict[Kernel, Any], Callable[[Any, str], object]]:
    """Return the specification of each kernel of a tree, and a function that compiles one.

    The imported cuflash must come from that tree.
    """
    (path,) = root.glob(f"tests/**/{GATE}")
    os.environ["CUFLASH_PROFILE"] = "long"  # so that the gate lists all kernels
    sys.path[:0] = sorted({str(module.parent) for module in root.glob("tests/**/*.py")})
    gate = runpy.run_path(str(path))
    spec_of = {}
    for spec, architecture in specifications(gate):
        names = [field.name for field in fields(spec) if field.name not in ("family", "entry", "shared_bytes")]
        said = tuple((name, str(getattr(spec, name))) for name in names)
        spec_of[Kernel(f"{spec.family}_{_entry(spec)}", architecture, said)] = spec
    return spec_of, next(value for value in gate.values() if hasattr(value, "cubin")).cubin


def _entry(spec: Any) -> str:
    """Return the name of a kernel's entry; older trees store it as text."""
    return str(getattr(spec.entry, "name", spec.entry))


class _Stop(Exception):
    """The exception that stops the library before it compiles."""


class _Recorder:
    """A replacement for cuda.core.Program that records its arguments."""

    def __init__(self, text: str, language: str, options: Any) -> None:
        self.arguments = text, [option.decode() for option in options.as_bytes("nvrtc")]

    def compile(self, *_: object, **__: object) -> None:
        raise _Stop(*self.arguments)


def serve(root: Path, path: Path, wanted: Path | None = None) -> None:
    """Write a tree's kernels to a file or, for the kernels whose numbers are in `wanted`, their `Given` objects.

    Texts are written next to the file of numbers, one at a time, because those of all kernels take gigabytes.
    """
    specs, compile_one = by_kernel(root)
    kernels = sorted(specs)
    if wanted is None:
        path.write_text(json.dumps(kernels), "utf-8")
        return
    records = []
    with patch("cuda.core.Program", _Recorder):
        for number in json.loads(wanted.read_text("utf-8")):
            try:
                compile_one(specs[kernels[number]], kernels[number].architecture)
            except _Stop as stop:
                text, options = stop.args
            file = wanted.parent / f"{hashlib.sha256(compared_text(text).encode()).hexdigest()}.cu"
            if not file.exists():
                file.write_text(text, "utf-8")
            records.append((file.name, options, _launch_shared_bytes(specs[kernels[number]])))
    path.write_text(json.dumps(records), "utf-8")


def _launch_shared_bytes(spec: Any) -> int:
    """Return the dynamic shared memory of a launch, from its specification or family.

    Older trees, in which families were not objects, have ``cuflash.tiles.shared_bytes``.
    """
    of_no_family = ("cache", "fp8", "lists", "results")
    if _entry(spec) in ("sink_gradient", "captured_sums") or spec.family in of_no_family:
        return 0  # the size depends only on `num_threads`, a field that is compared
    if hasattr(spec, "shared_bytes"):
        return int(spec.shared_bytes)
    for module, function in (("cuflash.planning.routing", "family_of"), ("cuflash.tiles", "shared_bytes")):
        try:
            entry = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError:
            continue
        return int(entry(spec) if function == "shared_bytes" else entry(spec).shared_bytes(spec))
    raise LookupError("this tree says nowhere how much shared memory a launch takes")


def served(root: Path, folder: Path, wanted: Sequence[int] | None = None) -> Any:
    """Return the output of `serve` in a process with a separate folder, which imports that tree's library."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "served.json"]
    if wanted is not None:
        paths.append(folder / "wanted.json")
        paths[1].write_text(json.dumps(wanted), "utf-8")
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, __file__, "--serve", root, *paths], env=environment, check=True)
    return json.loads(paths[0].read_text("utf-8"))


def kernels_of(root: Path, folder: Path) -> list[Kernel]:
    """Return the kernels of a tree; each kernel's index in this list is its file name in `given_for`."""
    return [
        Kernel(name, architecture, tuple((field, value) for field, value in said))
        for name, architecture, said in served(root, folder)
    ]


def given_for(root: Path, folder: Path, numbers: Sequence[int]) -> list[Given]:
    return [Given(folder / text, tuple(options), shared) for text, options, shared in served(root, folder, numbers)]


def unpack(root: Path, commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder."""
    done = subprocess.run(["git", "-C", str(root), "archive", "--format=tar", commit], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"BASE must be a commit of {root}; got {commit!r}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


# Compilation of texts to functions


_COMMENTS = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def bare(text: str) -> str:
    """Remove comments, #line directives and trailing white space from a source text."""
    lines = _COMMENTS.sub(lambda match: match[1] or " ", text).splitlines()
    stripped = (line.strip() for line in lines)
    return "\n".join(line for line in stripped if line and not line.startswith("#line"))


_END_OF_CONSTANTS = "#define CUFLASH_FEATURES"


def compared_text(text: str) -> str:
    """Return all parts of a text on which its machine code may depend."""
    constants, end, rest = text.partition(_END_OF_CONSTANTS)
    return bare(constants) + end + _compared_part(rest) if end else _compared_part(text)


@lru_cache(maxsize=64)
def _compared_part(text: str) -> str:
    """Return the compared part of a text, which many specifications of a kernel share."""
    return bare(text) if re.search(r"\b__(LINE|FILE|COUNTER|DATE|TIME)__\b", text) is None else text


def compiled(text: str, options: Sequence[str]) -> dict[str, cubin.Function]:
    """Compile a text and return its functions by name.

    Raises
    ------
    ValueError
        NVRTC refuses the text; the message is its log.
    """
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise ValueError(log.decode(errors="replace").strip("\0 \n"))
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code = b" " * size
        nvrtc.nvrtcGetCUBIN(program, code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin.functions(code)


def cached_functions(cache: Path, text: str, options: Sequence[str]) -> dict[str, cubin.Function]:
    """Return the functions of a text like `compiled`, from the disk cache if possible.

    A compiler error becomes a field of the text's only kernel.
    """
    from cuda.bindings import nvrtc

    version, reader = nvrtc.nvrtcVersion()[1:], Path(cubin.__file__).read_text("utf-8")
    digest = hashlib.sha256(json.dumps([version, reader, list(options), compared_text(text)]).encode()).hexdigest()
    path = cache / digest[:2] / f"{digest}.json.gz"
    if path.exists():
        stored = json.loads(gzip.decompress(path.read_bytes()))
        return {name: {field: _from_text(value) for field, value in each.items()} for name, each in stored.items()}
    try:
        functions = compiled(text, options)
    except ValueError as error:
        return {"kernel": {"compiles": str(error).partition("\n")[0]}}
    shown = {name: {field: _to_text(value) for field, value in each.items()} for name, each in functions.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(gzip.compress(json.dumps(shown).encode(), 6))
    partial.replace(path)
    return functions


def kept_file(cache: Path, path: Path, options: Sequence[str]) -> dict[str, cubin.Function]:
    """Return the functions of the text in a file, like `cached_functions`."""
    return cached_functions(cache, path.read_text("utf-8"), options)


def _to_text(value: Any) -> Any:
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def _from_text(value: Any) -> Any:
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value


# Comparison


def differences(
    kernel: str, before: Mapping[str, cubin.Function], after: Mapping[str, cubin.Function]
) -> Iterator[Difference]:
    """Yield each field of each function that differs."""
    for function in sorted(before.keys() | after.keys()):
        if function not in before or function not in after:
            yield Difference(kernel, function, "function", *_there(function in before, function in after))
            continue
        one, other = before[function], after[function]
        for field in sorted(one.keys() | other.keys()):
            if one.get(field) != other.get(field):
                yield Difference(kernel, function, field, *_both(field, one.get(field), other.get(field)))


def _there(*is_there: bool) -> tuple[str, str]:
    first, second = ("there" if each else "missing" for each in is_there)
    return first, second


def _both(field: str, before: Any, after: Any) -> tuple[str, str]:
    """Return how a difference is displayed: for bytes, only their number and the position of the first difference."""
    if not (isinstance(before, bytes) and isinstance(after, bytes)):
        return tuple("missing" if each is None else str(each) for each in (before, after))  # type: ignore[return-value]
    size, unit = (16, "instructions") if field == "instructions" else (1, "bytes")
    pairs = [(before[place : place + size], after[place : place + size]) for place in range(0, len(before), size)]
    unlike = [place for place, (one, other) in enumerate(pairs) if one != other]
    first = size * unlike[0] if unlike else len(before)
    count = f"{len(unlike)} differ, " if len(before) == len(after) else ""
    return f"{len(before) // size} {unit}", f"{len(after) // size} {unit}, {count}the first at {first:#x}"


def matched(
    before: Sequence[Kernel], after: Sequence[Kernel], renamed: Mapping[str, str]
) -> tuple[dict[Kernel, int], dict[Kernel, int], set[str]]:
    """Match the kernels of two trees: return pairs of indices, and the names of the fields that only one tree has.

    Kernels that differ from others only in a new field with a value other than the default are left out.

    Raises
    ------
    SystemExit
        Kernels of one tree differ only in a field that the other tree does not have.
    """

    def new(name: str) -> str:
        return renamed.get(name, name)

    def is_new(kernel: Kernel, shared: Container[str]) -> bool:
        own = (pair for pair in kernel.specification if pair[0] not in shared)
        return any(value != DEFAULTS.get(field, value) for field, value in own)

    before = [
        Kernel(new(name), architecture, tuple((new(field), value) for field, value in said))
        for name, architecture, said in before
    ]
    first, second = ({field for kernel in side for field, _ in kernel.specification} for side in (before, after))
    numbers_of_sides: list[dict[Kernel, int]] = []
    for side in (before, after):
        numbers: dict[Kernel, int] = {}
        for number, kernel in enumerate(side):
            shared = tuple(sorted(pair for pair in kernel.specification if pair[0] in first & second))
            key = kernel._replace(specification=shared)
            if key in numbers and is_new(kernel, first & second):
                continue
            if key in numbers and not is_new(side[numbers[key]], first & second):
                raise SystemExit(
                    f"without the fields that only one tree has, {', '.join(sorted(first ^ second))}, two kernels are "
                    f"one, {side[numbers[key]]} and {kernel}: give their new names by --renamed old=new"
                )
            numbers[key] = number
        numbers_of_sides.append(numbers)
    return numbers_of_sides[0], numbers_of_sides[1], first ^ second


def quick(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Choose few kernels that cover everything that any kernel covers: greedily by new coverage, then the narrowest."""
    of_quick = (kernel for kernel in kernels if kernel.architecture in QUICK_ARCHITECTURES)
    heap = [(-len(_parts(kernel)), _width(kernel), kernel) for kernel in of_quick]
    heapq.heapify(heap)
    selected, covered = [], set[object]()
    while heap:  # the coverage that a kernel adds never grows, so the largest up-to-date value is the best
        before, width, kernel = heapq.heappop(heap)
        adds = _parts(kernel) - covered
        if len(adds) == -before:
            selected.append(kernel)
            covered |= adds
        elif adds:
            heapq.heappush(heap, (-len(adds), width, kernel))
    return selected


def _width(kernel: Kernel) -> int:
    """Return the sum of the dimensions; narrow kernels compile faster."""
    return sum(int(value) for name, value in kernel.specification if name in _DIMS)


_DIMS, _TILE = ("head_dim", "value_dim"), ("block_q", "block_kv", "num_warps", "min_blocks")


def _parts(kernel: Kernel) -> set[object]:
    """Return what a kernel covers: architecture, fields, pair of dimensions, tile, combination of flags."""
    said = kernel.specification
    values = dict(said)
    flags = tuple(pair for pair in said if pair[0] not in (*_DIMS, *_TILE, "dtype"))
    together = (tuple(map(values.get, _DIMS)), tuple(map(values.get, _TILE)), flags)
    return {(kernel.name, kernel.architecture)} | {(kernel.name, *each) for each in (*said, *enumerate(together))}


def compared(
    kernels: Sequence[Kernel], before: Sequence[Given], after: Sequence[Given], cache: Path, workers: int
) -> Iterator[Difference]:
    """Yield the differences between kernels before and after.

    Only kernels whose texts differ are compiled, each text once.
    """
    with ProcessPoolExecutor(workers) as pool:
        changed = (each for pair in zip(before, after) if pair[0].code() != pair[1].code() for each in pair)
        wanted = {each.code(): each for each in changed}
        jobs = {code: pool.submit(kept_file, cache, each.text, each.options) for code, each in wanted.items()}
        for number, (kernel, one, other) in enumerate(zip(kernels, before, after, strict=True), 1):
            unequal = list[Difference]()
            if one.code() != other.code():
                unequal += differences(str(kernel), jobs[one.code()].result(), jobs[other.code()].result())
            shared_bytes = one.launch_shared_bytes, other.launch_shared_bytes
            if None not in shared_bytes and shared_bytes[0] != shared_bytes[1]:
                unequal.append(Difference(str(kernel), "launch", "dynamic shared bytes", *map(str, shared_bytes)))
            yield from unequal
            _progress(number, len(kernels), bool(unequal))


def _progress(number: int, total: int, differs: bool) -> None:
    if sys.stderr.isatty() or differs or number % 100 == 0:
        end = "\r" if sys.stderr.isatty() and number < total else "\n"
        print(f"{number} of {total} kernels compared", end=end, file=sys.stderr, flush=True)


# The command line


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    sys.path.append(str(Path(__file__).parents[1] / "support"))  # for direct runs of this file
    from command_line import Parser  # the other tree, in which --serve runs, may not have this module

    parser = Parser(__doc__)
    parser.add_argument("base", metavar="BASE", help="commit or branch to compare with")
    parser.add_argument("--quick", action="store_true", help="compare few kernels, of sm_80, sm_90 and sm_90a")
    parser.add_argument("--families", type=_comma_separated, default=(), help="default: all")
    parser.add_argument("--kernels", type=_comma_separated, default=(), help="such as sm90_forward; default: all")
    parser.add_argument("--architectures", type=_comma_separated, default=(), help="default: all")
    parser.add_argument("--renamed", type=_comma_separated, default=(), metavar="OLD=NEW,...", help="changed names")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"default {CACHE}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the compared kernels and every difference")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=cores, help=f"compilers at a time, default {cores}")
    options = parser.parse_args(argv)
    for pair in options.renamed:
        if not re.fullmatch(r"\w+=\w+", pair):
            parser.error(f"--renamed must be old and new names, as is_packed=pack_gqa; got {pair!r}")
    if options.workers < 1:
        parser.error(f"--workers must be at least 1; got {options.workers}")
    return options


def _nothing_chosen(kernels: Sequence[Kernel]) -> str:
    """Return an error message for an option that selects no kernel."""
    families = sorted({kernel.name.partition("_")[0] for kernel in kernels})
    architectures = sorted({kernel.architecture for kernel in kernels})
    return (
        "--families, --kernels and --architectures must name some kernel that both trees have; none has these: "
        f"families are {', '.join(families)}; architectures are {', '.join(architectures)}"
    )


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Compare both trees, and return the exit status."""
    options = arguments(argv)
    renamed = dict(pair.split("=", 1) for pair in options.renamed)

    def is_asked_for(kernel: Kernel) -> bool:
        family = kernel.name.partition("_")[0]
        return (
            family in (options.families or (family,))
            and kernel.name in (options.kernels or (kernel.name,))
            and kernel.architecture in (options.architectures or (kernel.architecture,))
        )

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        roots, texts = (folder / "tree", root), (folder / "before", folder / "after")
        unpack(root, options.base, roots[0])
        old, new = pool.map(kernels_of, roots, texts)
        *numbers, not_shared = matched(old, new, renamed)
        alone = [
            Difference(str(kernel), "kernel", "specification", *_there(*(kernel in side for side in numbers)))
            for kernel in sorted(numbers[0].keys() ^ numbers[1].keys())
            if is_asked_for(kernel)
        ]
        chosen = sorted(filter(is_asked_for, numbers[0].keys() & numbers[1].keys()))
        if options.quick:
            chosen = sorted(quick(chosen))
        if not chosen and not alone:
            raise SystemExit(_nothing_chosen(sorted(numbers[0].keys() & numbers[1].keys())))
        numbered = [[side[kernel] for kernel in chosen] for side in numbers]
        before, after = pool.map(given_for, roots, texts, numbered)
        differing = [*alone, *compared(chosen, before, after, options.cache, options.workers)]
    num_equal = sum(one.code() == other.code() for one, other in zip(before, after))
    summary = _summary(differing, chosen, options.base, not_shared, num_equal)
    if options.json is not None:
        record = {"base": options.base, "summary": summary, "compared": list(map(str, chosen))}
        text = json.dumps(record | {"differences": [each._asdict() for each in differing]}, indent=1)
        options.json.write_text(text + "\n", "utf-8")
    for difference in differing[:MOST_SHOWN]:
        print(difference)
    if len(differing) > MOST_SHOWN:
        print(f"and {len(differing) - MOST_SHOWN} more")
    print(summary)
    return 1 if differing else 0


def _summary(
    differing_fields: Sequence[Difference], chosen: Sequence[Kernel], base: str, not_shared: set[str], num_equal: int
) -> str:
    architectures = len({kernel.architecture for kernel in chosen})
    head = f"{len(chosen)} kernels of {architectures} architectures compared with {base}, {num_equal} by equal text"
    tail = f"; not compared by {', '.join(sorted(not_shared))}" if not_shared else ""
    if not differing_fields:
        return f"{head}: the same machine code{tail}"
    counts = Counter((each.kernel.split()[1], each.field) for each in differing_fields)
    lines = [f"  {kernel}: {field} of {count}" for (kernel, field), count in sorted(counts.items())]
    differing = len({each.kernel for each in differing_fields})
    return "\n".join([f"{head}: {differing} differ{tail}", *lines])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*map(Path, sys.argv[2:]))
    else:
        sys.exit(main())
