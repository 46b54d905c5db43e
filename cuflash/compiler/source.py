"""The source text of a kernel: constants of its specification, then the entry file with its includes flattened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..arrays import KNOWN_DTYPES
from ..planning.spec import KernelSpec
from . import score_text
from .params_layout import assertions

_INSTALLED = Path(__file__).parents[1] / "kernels_cu"
# The folder of the kernels: inside the installed package or, in a source tree, next to cuflash/.
KERNELS = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "kernels_cu"
HOST = Path(__file__).parents[1] / "sim"  # the simulator, whose ptx/ folder replaces that of kernels_cu/

_ELEMENTS = {each.numpy: each.element for each in KNOWN_DTYPES}
# The kernel parameter that each feature field of a specification adds, in the order of `Launch.features`.
_FEATURES = {
    "is_split": "cuflash::sm80::Parts parts", "packs_queries": "cuflash::attention::ChosenLists chosen",
    "is_chosen": "cuflash::attention::ChosenPages chosen_pages",
    "has_sink": "cuflash::attention::Sink sink", "score": "cuflash::score::Function score_function",
    "score_is_staged": "cuflash::sm90::StagedMap staged_map",
    "has_dropout": "cuflash::attention::Dropout dropout", "is_paged": "cuflash::attention::Pages pages",
    "is_quantized": "cuflash::attention::Scales scales", "tangents": "cuflash::attention::Tangents tangents",
}  # fmt: skip
_TANGENTS = ("q", "k", "v", "sink", "score", "do")  # arrays, or groups of arrays, whose tangents kernels may read
_TF32_PRODUCTS = {"ieee": 0, "tf32": 1, "tf32x3": 3}  # number of TF32 products that replace one float32 product
_SHARED_BYTES = re.compile(r"^constexpr int kSharedBytes =", re.MULTILINE)
_INCLUDE = re.compile(r"\s*#\s*include(.*)")  # also matches include_next
_OURS = re.compile(r"\s*<([a-z0-9]+/[a-z0-9_]+\.cuh)>\s*(?://.*)?")


def constants(spec: KernelSpec) -> str:
    """Return a specification as C++: a constant for each field, and whether the kernel is part of a backward pass."""
    accumulator = "double" if spec.dtype == np.float64 else "float"
    lines = [f"using Element = {_ELEMENTS[spec.dtype]};", f"using Accumulator = {accumulator};"]
    lines.append(f"static constexpr int kTf32Products = {_TF32_PRODUCTS[spec.precision]};")
    for field in fields(spec)[2:]:
        if field.name in ("precision", "tangents") or field.name.startswith("score"):
            continue
        name = "".join(word.capitalize() for word in field.name.split("_"))
        value = getattr(spec, field.name)
        type_name, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
        lines.append(f"static constexpr {type_name} k{name} = {text};")
    lines.append(f"static constexpr bool kIsBackward = {str(spec.entry.loads_do).lower()};")
    flags = {f"kHas{name.capitalize()}Dot": str(name in spec.tangents).lower() for name in _TANGENTS}
    lines += [f"static constexpr bool {name} = {value};" for name, value in flags.items()]
    features = "".join(f", const __grid_constant__ {each}" for name, each in _FEATURES.items() if getattr(spec, name))
    lines = ["namespace cuflash {", "struct Config {", *lines, "};", "}  // namespace cuflash"]
    return "\n".join([*lines, f"#define CUFLASH_FEATURES {features}", ""])


@lru_cache(maxsize=1024)
def source(spec: KernelSpec, *, host: bool = False) -> str:
    """Return the whole source of a kernel as one text for NVRTC or, with the simulator's `ptx/`, for the host compiler.

    `#line` directives keep the original file names and line numbers in every compiler message.
    """
    included: set[str] = set()
    types = "".join(_flattened("ptx/types.cuh", included, host))
    score = "" if spec.score is None else _score(spec, included, host)
    entry = "".join(_flattened(f"{spec.family}/{spec.entry.name}.cu", included, host))
    layout = f'#line 1 "cuflash/compiler/params_layout.py: assertions()"\n{assertions(included, host=host)}'
    if _SHARED_BYTES.search(entry):  # the kernel states its own size of dynamic shared memory
        layout += f'#line 1 "cuflash/planning: KernelSpec.shared_bytes"\n{_shared_assertion(spec)}'
    return f"// {spec}\n{types}{constants(spec)}{score}{entry}{layout}"


def _shared_assertion(spec: KernelSpec) -> str:
    """Return C++ that does not compile if the kernel's size of shared memory differs from the size of its launches."""
    rule, nbytes = f"cuflash::{spec.family}::kSharedBytes", spec.shared_bytes
    return f'static_assert({rule} == {nbytes}, "launches ask for {nbytes} bytes of shared memory");\n'


def _score(spec: KernelSpec, included: set[str], host: bool) -> str:
    """Return the text of a specification's score function, which replaces `attention/score_function.cuh`."""
    assert spec.score is not None
    included.add("attention/score_function.cuh")
    functions = "".join(_flattened("attention/score_math.cuh", included, host))
    printed = score_text.text(
        spec.score, spec.score_wrt, spec.accumulator, spec.score_sums,
        is_staged=spec.score_is_staged, is_stored=spec.score_is_stored, num_bins=spec.score_bins,
        is_placed=spec.score_is_placed, takes_products=spec.score_takes_products, is_pushed=spec.moves_scores,
    )  # fmt: skip
    return f'{functions}#line 1 "cuflash/compiler/score_text.py: text()"\n{printed}'


def flatten(path: str, *, host: bool = False) -> str:
    """Return the text of a file of `kernels_cu/` with all files that it includes, each file once.

    Raises
    ------
    ValueError
        An include does not name a file of `kernels_cu/` in angle brackets.
    """
    return "".join(_flattened(path, set(), host))


def flatten_text(text: str, name: str, *, host: bool = False) -> str:
    """Return a text with all files of `kernels_cu/` that it includes, each file once.

    Compiler messages call the text `name`.
    """
    return "".join(_expanded(text, name, set(), host))


def _flattened(path: str, included: set[str], host: bool) -> Iterator[str]:
    included.add(path)
    yield from _expanded(_read(path, host), _shown(path, host), included, host)


def _expanded(text: str, shown: str, included: set[str], host: bool) -> Iterator[str]:
    for lines, path in _pieces(text, shown):
        yield lines
        if path and path not in included:
            yield from _flattened(path, included, host)


@lru_cache(maxsize=1024)
def _pieces(text: str, shown: str) -> list[tuple[str, str]]:
    """Split a text at its includes, and return each piece with the path that is included after it, or ""."""
    pieces, lines = [], [f'#line 1 "{shown}"\n']
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.fullmatch(line)
        if include is None:
            lines.append("\n" if line == "#pragma once" else line + "\n")  # files are included once without the pragma
            continue
        ours = _OURS.fullmatch(include[1])
        if ours is None:
            raise ValueError(
                f"{shown}:{number} must include files of kernels_cu/ in angle brackets, like <ptx/mma.cuh>; "
                f"it has {line.strip()!r}"
            )
        pieces.append(("".join(lines), ours[1]))
        lines = [f'#line {number + 1} "{shown}"\n']
    return [*pieces, ("".join(lines), "")]


def _shown(path: str, host: bool) -> str:
    """Return the name of a file in compiler messages."""
    return f"cuflash/sim/{path}" if host and path.startswith("ptx/") else f"kernels_cu/{path}"


def _read(path: str, host: bool) -> str:
    folder = HOST if host and path.startswith("ptx/") else KERNELS
    return (folder / path).read_text("utf-8")
