"""Rooms import only leftwards, and each holds only what belongs there. The tables are the rule; `rules` reads them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Left to right; "cuflash" is __init__.py. A new room is a new word here.
ROOMS = """errors arrays memory tensor_map device mask block_set masks patterns problem reference classify whole_grid
block_index work_list records source sm80_tiles sm90_tiles dq_turns tiles plans params checks passes states bounds
compile sim.launch sim.compiler sim blas cpu gpu simulated launch api doctor cuflash __main__
testing.oracle testing.assertions testing.strategies testing.properties testing""".split()

THIRD_PARTY = {
    "arrays": {"ml_dtypes"},
    "masks": {"scipy"},
    "patterns": {"scipy"},
    "block_index": {"scipy"},
    "bounds": {"ml_dtypes", "scipy"},
    "compile": {"cuda", "cupy"},
    "tensor_map": {"cuda"},
    "blas": {"threadpoolctl"},
    "gpu": {"cupy"},
    "doctor": {"threadpoolctl"},
    "testing.oracle": {"ml_dtypes", "scipy"},
    "testing.assertions": {"ml_dtypes"},
    "testing.strategies": {"hypothesis", "ml_dtypes"},
    "testing.properties": {"hypothesis"},
}
EVERYWHERE = {"numpy", "cuflash", *sys.stdlib_module_names} - {"pickle", "marshal", "shelve", "dbm"}

# Closer walls than the order: the specification and the oracle share no code with what they judge.
ONLY = {"reference": {"errors", "arrays"}}
NEVER = {
    "testing.oracle": {"classify", "block_index", "work_list", "plans", "states", "cpu", "launch", "api", "cuflash"},
    "block_index": {"device", "problem", "reference"},
    "work_list": {"device", "reference"},
    "cpu": {"reference"},
    "launch": {"reference"},
}
# Functions that may look at the environment.
ENVIRONMENT = {"sim.compiler": {"_run"}, "compile": {"_environment", "_spare_cupy_its_folder"}, "checks": {"is_on"}}
# Rooms that ask or carry do not decide.
WORDS = {
    "compile": {"head_dim", "value_dim", "block_q", "block_kv", "seqlen_q", "seqlen_kv"},
    "device": {"head_dim", "seqlen_q", "seqlen_kv"},
    "launch": {"head_dim", "block_q", "block_kv"},
}
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "legacy", "experimental"}


def rules(room: str, source: str) -> Iterator[str]:
    """What the source of a room does that the room may not do."""
    if SHAPELESS_NAMES & set(room.split(".")):
        yield "a room is named after a concept"
    if room not in ROOMS:
        yield f"{room} is not in the table of rooms"
        return
    tree = ast.parse(source)
    if room != "doctor" and _reads_environment(tree, ENVIRONMENT.get(room, set())):
        yield "reads the environment"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node in tree.body:
            yield from (f"imports {name} before it is needed" for name in _heavy(node))
        for target, names in _imports(room, node):
            yield from _import_rules(room, target, names)
        if isinstance(node, ast.Call) and _name(node.func) in ("eval", "exec", "import_module", "__import__"):
            yield f"calls {_name(node.func)}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", True):
            yield "allows pickles"
        if _name(node) in WORDS.get(room, ()):
            yield f"speaks of {_name(node)}"


def _reads_environment(tree: ast.Module, allowed: set[str]) -> bool:
    inside = {
        id(node)
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name in allowed
        for node in ast.walk(function)
    }
    return any(_name(node) in ("environ", "getenv") and id(node) not in inside for node in ast.walk(tree))


def _heavy(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Packages that only a GPU needs, of those that an import statement asks for."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    if not getattr(node, "level", 0):
        yield from (name for name in modules if name.partition(".")[0] in ("cupy", "cuda"))


def _name(node: ast.AST) -> str | None:
    """The last word of a name, an attribute or a parameter."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)


def _imports(room: str, node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Absolute names of the modules that an import statement asks for, and the names it takes out of each."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, []) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = _module(room)
        package = module if room in ("cuflash", "sim", "testing") else module.rpartition(".")[0]
        base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        target = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            inside = f"{target}.{alias.name}"
            is_room = inside.startswith("cuflash.") and _room(inside) in ROOMS
            yield (inside, []) if is_room else (target, [alias.name])


def _module(room: str) -> str:
    return room if room == "cuflash" else f"cuflash.{room}"


def _room(module: str) -> str:
    return module if module == "cuflash" else module.removeprefix("cuflash.")


def _import_rules(room: str, target: str, names: list[str]) -> Iterator[str]:
    if target.split(".")[0] != "cuflash":
        if target.split(".")[0] not in EVERYWHERE | THIRD_PARTY.get(room, set()):
            yield f"imports {target}"
        return
    other = _room(target)
    if other not in ROOMS:
        yield f"imports {target}, which is no room"
    elif ROOMS.index(other) >= ROOMS.index(room):
        yield f"imports {other}, which is not to its left"
    elif other in NEVER.get(room, ()) or other not in ONLY.get(room, ROOMS):
        yield f"imports {other}, from which it is kept apart"
    yield from (f"takes {name} out of {other}" for name in names if name.startswith("_") and not name.startswith("__"))


def _library() -> dict[str, Path]:
    paths = sorted((ROOT / "cuflash").rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return dict(zip(map(_room, names), paths))


@pytest.mark.parametrize("room", _library())
def test_every_room_keeps_the_rules(room: str) -> None:
    assert list(rules(room, _library()[room].read_text("utf-8"))) == []


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").rglob("*.py")), ids=lambda path: path.stem)
def test_experiments_never_import_tests(path: Path) -> None:
    modules = {name.stem for name in (ROOT / "tests").glob("*.py")} | {"tests"}
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    asked = {target.split(".")[0] for node in nodes for target, _ in _imports("cuflash", node)}
    assert asked & modules == set()


PLANTED = {
    ("masks", "import cupy"): "imports cupy",
    ("cpu", "def f():\n    import cupy.cuda as c"): "imports cupy.cuda",
    ("launch", "from cupy import ndarray"): "imports cupy",
    ("arrays", "import importlib\nimportlib.import_module('cupy')"): "calls import_module",
    ("block_index", "import torch"): "imports torch",
    ("api", "import threadpoolctl"): "imports threadpoolctl",
    ("api", "from experiments.harness import table"): "imports experiments.harness",
    ("api", "import tests.conftest"): "imports tests.conftest",
    ("masks", "from .api import attention"): "imports api, which is not to its left",
    ("masks", "from . import api"): "imports api, which is not to its left",
    ("masks", "from cuflash import cpu"): "imports cpu, which is not to its left",
    ("masks", "import cuflash.cpu"): "imports cpu, which is not to its left",
    ("masks", "from . import attention"): "imports cuflash, which is not to its left",
    ("masks", "from .masks import Causal"): "imports masks, which is not to its left",
    ("errors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .arrays import Array"):
        "imports arrays, which is not to its left",
    ("api", "from .testing.strategies import arrays"): "imports testing.strategies, which is not to its left",
    ("api", "from .errors import _private"): "takes _private out of errors",
    ("api", "from .nowhere import x"): "imports cuflash.nowhere, which is no room",
    ("reference", "from .masks import Causal"): "imports masks, from which it is kept apart",
    ("testing.oracle", "from ..cpu import forward"): "imports cpu, from which it is kept apart",
    ("api", "import pickle"): "imports pickle",
    ("api", "np.load(f, allow_pickle=True)"): "allows pickles",
    ("api", "eval('1')"): "calls eval",
    ("cpu", "import os\nos.environ['X']"): "reads the environment",
    ("compile", "import os\ndef _dump(): return os.environ['X']"): "reads the environment",
    ("checks", "import os\ndef current(): return os.environ['X']"): "reads the environment",
    ("launch", "import os\ndef is_on(): return os.environ['X']"): "reads the environment",
    ("compile", "import os\nX = os.getenv('X')\ndef _environment(): return os.environ"): "reads the environment",
    ("compile", "import cupy"): "imports cupy before it is needed",
    ("compile", "from cuda.core import Program"): "imports cuda.core before it is needed",
    ("compile", "spec.head_dim > 64"): "speaks of head_dim",
    ("device", "def f(head_dim): ..."): "speaks of head_dim",
    ("launch", "if problem.head_dim > 64: pass"): "speaks of head_dim",
    ("utils", ""): "a room is named after a concept",
    ("stray", ""): "stray is not in the table of rooms",
}  # fmt: skip


@pytest.mark.parametrize(("room", "source"), PLANTED)
def test_a_planted_violation_is_caught(room: str, source: str) -> None:
    assert PLANTED[room, source] in list(rules(room, source))


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("api", "import numpy as np\nfrom .masks import Causal\nfrom . import masks"),
        ("cuflash", "from . import masks\nfrom .api import attention\nfrom .doctor import doctor"),
        ("testing.properties", "from hypothesis import given\nfrom .. import masks, attention\nfrom .oracle import x"),
        ("testing", "from .oracle import check\nfrom . import strategies"),
        ("compile", "import os\ndef _environment(): return os.environ"),
        ("compile", "def _cupy():\n    import cupy\n    return cupy"),
        ("arrays", "import ml_dtypes\nfrom .errors import UnsupportedProblem"),
    ],
)
def test_what_is_allowed_passes(room: str, source: str) -> None:
    assert list(rules(room, source)) == []


# Blocked before the first import, as on a machine that has none of them.
FRESH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cupy", "cupyx", "cuda", "torch", "jax", "hypothesis", "pytest", "matplotlib"}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import numpy as np, cuflash
q = np.ones((2, 4, 3), np.float32)
assert np.allclose(cuflash.attention(q, q, q, causal=True), 1)
o, vjp = cuflash.attention_vjp(q, q, q, mask=cuflash.masks.Causal())
assert vjp(o).dq.shape == q.shape
print("fine")
"""


def test_cuflash_works_without_gpu_packages_and_test_packages() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.returncode) == ("fine\n", 0), run.stderr
