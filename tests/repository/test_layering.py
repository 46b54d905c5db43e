"""Rooms import only leftwards, and each holds only what belongs there. The tables are the rule; `rules` reads them.

A room is a subpackage or a module directly under cuflash/. Modules of one room may import each other, but in no circle.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cuflash
from cuflash.planning.routing import FAMILIES

ROOT = Path(__file__).parents[2]

# Left to right; "cuflash" is __init__.py. A new room is a new word here.
ROOMS = """keywords errors arrays layouts dropout scores masks patterns reference blocks planning compiler sim executors
plans fp8 calls merging packing bounds api torch jax cache study selectors diagnosis cuflash __main__
testing""".split()
MODULES = {
    ".".join(path.relative_to(ROOT / "cuflash").with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "cuflash").rglob("*.py")
} - {"__init__"} | {"cuflash"}
PACKAGES = {"cuflash"} | {module.rpartition(".")[0] for module in MODULES if "." in module}

THIRD_PARTY = {
    "testing.formulas": {"hypothesis", "ml_dtypes"},
    "arrays": {"ml_dtypes", "scipy"},
    "masks.pictures": {"matplotlib"},
    "patterns": {"scipy"},
    "blocks.index": {"scipy"},
    "bounds.rounding": {"ml_dtypes"},
    "fp8.e4m3": {"ml_dtypes"},
    "layouts": {"cupy"},
    "compiler.nvrtc": {"cuda", "cupy"},
    "compiler.host_cache": {"platformdirs"},
    "executors.tensor_map": {"cuda"},
    "executors.blas": {"threadpoolctl"},
    "executors.gpu": {"cupy"},
    "executors.torch_gpu": {"torch"},
    "torch": {"torch"},
    "jax": {"jax"},
    "diagnosis": {"threadpoolctl"},
    "study.command": {"matplotlib"},
    "testing.oracle": {"ml_dtypes", "scipy"},
    "testing.assertions": {"ml_dtypes"},
    "testing.mask_strategies": {"hypothesis"},
    "testing.strategies": {"hypothesis", "ml_dtypes"},
    "testing.properties": {"hypothesis"},
}
EVERYWHERE = {"numpy", "cuflash", *sys.stdlib_module_names} - {"pickle", "marshal", "shelve", "dbm"}

# Closer walls than the order: the specification and the oracle share no code with what they judge.
ONLY = {"reference": {"keywords", "errors", "arrays"}}
NEVER = {
    "testing.oracle": {"blocks", "planning", "executors", "merging", "plans", "api", "cuflash"},
    "blocks.index": {"reference"},
    "blocks.work_list": {"reference"},
    "executors.cpu": {"reference", "compiler", "sim"},
    "plans": {"reference"},
}
# Functions that may look at the environment.
ENVIRONMENT = {
    "sim.compiler": {"_run"},
    "compiler.nvrtc": {"_environment", "_redirect_cupy_cache"},
    "compiler.host_cache": {"folder"},
    "executors.checks": {"is_on"},
}
# Modules that ask or carry do not decide.
WORDS = {
    "compiler.nvrtc": {"head_dim", "value_dim", "block_q", "block_kv", "seqlen_q", "seqlen_kv"},
    "planning.device": {"head_dim", "seqlen_q", "seqlen_kv"},
    "plans": {"head_dim", "block_q", "block_kv"},
}
NAMES_OF_FAMILIES = {"planning.families", "planning.options"}
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "legacy", "experimental"}


def rules(room: str, source: str) -> Iterator[str]:
    """List what the source of a room does against the room's rules."""
    if SHAPELESS_NAMES & set(room.split(".")):
        yield "a room is named after a concept"
    if _room_of(room) not in ROOMS:
        yield f"{room} is not in the table of rooms"
        return
    tree = ast.parse(source)
    if room != "diagnosis" and _reads_environment(tree, ENVIRONMENT.get(room, set())):
        yield "reads the environment"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node in tree.body:
            yield from (f"imports {name} before it is needed" for name in _heavy(node))
        for target, names in _imports(room, node):
            yield from _import_rules(room, target, names)
        # The package itself imports the modules of its public names by a table.
        banned = {"eval", "exec", "import_module", "__import__"} - ({"import_module"} if room == "cuflash" else set())
        if isinstance(node, ast.Call) and _name(node.func) in banned:
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
    """Yield the packages that only a GPU needs, among those that an import statement names."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    if not getattr(node, "level", 0):
        yield from (name for name in modules if name.partition(".")[0] in ("cupy", "cuda"))


def _name(node: ast.AST) -> str | None:
    """Return the last word of a name, an attribute or a parameter."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)


def _imports(room: str, node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield absolute names of the modules that an import statement names, and the names it takes from each."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, []) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = _module(room)
        package = module if room in PACKAGES else module.rpartition(".")[0]
        base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        target = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            inside = f"{target}.{alias.name}"
            yield (inside, []) if inside.removeprefix("cuflash.") in MODULES else (target, [alias.name])


def _module(room: str) -> str:
    return room if room == "cuflash" else f"cuflash.{room}"


def _room(module: str) -> str:
    return module if module == "cuflash" else module.removeprefix("cuflash.")


def _room_of(module: str) -> str:
    """Return the subpackage that a module is part of, or the module itself."""
    return module.partition(".")[0]


def _is_right_of(other: str, room: str) -> bool:
    return ROOMS.index(other) > ROOMS.index(room)


def _import_rules(room: str, target: str, names: list[str]) -> Iterator[str]:
    if target.split(".")[0] != "cuflash":
        if target.split(".")[0] not in EVERYWHERE | THIRD_PARTY.get(room, set()):
            yield f"imports {target}"
        return
    other = _room(target)
    if other not in MODULES:
        yield f"imports {target}, which is no room"
    elif _is_right_of(_room_of(other), _room_of(room)) or other == room:
        yield f"imports {other}, which is not to its left"
    elif {other, _room_of(other)} & NEVER.get(room, set()) or _room_of(other) not in ONLY.get(room, ROOMS):
        yield f"imports {other}, from which it is kept apart"
    yield from (f"takes {name} out of {other}" for name in names if name.startswith("_") and not name.startswith("__"))


def _library() -> dict[str, Path]:
    paths = sorted((ROOT / "cuflash").rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return dict(zip(map(_room, names), paths))


@pytest.mark.parametrize("room", _library())
def test_every_room_keeps_the_rules(room: str) -> None:
    assert list(rules(room, _library()[room].read_text("utf-8"))) == []


@pytest.mark.parametrize("room", sorted({_room_of(module) for module in MODULES if "." in module}))
def test_modules_of_a_room_import_each_other_in_no_circle(room: str) -> None:
    inside = {module: path for module, path in _library().items() if _room_of(module) == room}
    graph = {}
    for module, path in inside.items():
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        asked = {_room(target) for node in nodes for target, _ in _imports(module, node)}
        graph[module] = asked & set(inside)
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_few_modules_are_directly_under_the_package() -> None:
    assert len(list((ROOT / "cuflash").glob("*.py"))) <= 14


def test_the_package_imports_each_public_name_from_where_its_import_statements_say() -> None:
    tree = ast.parse(Path(cuflash.__file__).read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    stated = {alias.name: node.module or alias.name for node in imports for alias in node.names}
    assert sorted(stated) == cuflash.__all__
    # The executors add the kernels that make indices on a GPU; the class is the same.
    assert {**cuflash._MODULE_OF, "BlockIndex": "blocks.index"} == stated
    assert cuflash.BlockIndex is cuflash.blocks.index.BlockIndex


def test_the_package_lists_its_public_names_and_no_module_bears_that_of_a_function() -> None:
    assert dir(cuflash) == sorted([*cuflash.__all__, "__version__"])
    functions = {name for name in cuflash.__all__ if inspect.isfunction(getattr(cuflash, name))}
    assert functions.isdisjoint(path.stem for path in Path(cuflash.__file__).parent.iterdir())


def test_names_of_families_are_written_once() -> None:
    """Names stand where they are defined, in the type of `kernel=`, and in docstrings and messages."""
    found = {
        (room, node.value)
        for room, path in _library().items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in FAMILIES and room not in NAMES_OF_FAMILIES
    }
    assert found <= {("executors.params", "naive"), ("compiler.params_layout", "naive")}  # a part of a record


def branches_on_families(source: str) -> list[str]:
    """List the comparisons in a source with the name of a family."""
    names = {"SIMT", "SM80", "SM90", "FA1", "NAIVE"}
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare) and not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        if any(_name(part) in names | {"family"} for side in (node.left, *node.comparators) for part in ast.walk(side))
    ]


def test_only_routing_and_families_compare_names_of_families() -> None:
    """Other modules ask a family's object, and do not compare the names of families."""
    found = {
        room: branches
        for room, path in _library().items()
        if not room.startswith(("planning.families", "planning.routing"))
        if (branches := branches_on_families(path.read_text("utf-8")))
    }
    assert found == {}


def test_comparisons_with_names_of_families_are_found() -> None:
    for source in ("if family == SM90: pass", "x = spec.family in (SM80, FA1)", "y = 1 if spec.family == 'x' else 2"):
        assert len(branches_on_families(source)) == 1
    assert branches_on_families("if plan.family is None: pass") == []


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").rglob("*.py")), ids=lambda path: path.stem)
def test_experiments_never_import_tests(path: Path) -> None:
    modules = {name.stem for name in (ROOT / "tests").rglob("*.py")} | {"mutations", "tests"}
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    asked = {target.split(".")[0] for node in nodes for target, _ in _imports("cuflash", node)}
    assert asked & modules == set()


PLANTED = {
    ("masks.base", "import cupy"): "imports cupy",
    ("executors.cpu", "def f():\n    import cupy.cuda as c"): "imports cupy.cuda",
    ("plans", "from cupy import ndarray"): "imports cupy",
    ("arrays", "import importlib\nimportlib.import_module('cupy')"): "calls import_module",
    ("blocks.index", "import torch"): "imports torch",
    ("api", "import threadpoolctl"): "imports threadpoolctl",
    ("api", "from experiments.harness import table"): "imports experiments.harness",
    ("api", "import tests.conftest"): "imports tests.conftest",
    ("masks.base", "from ..api import attention"): "imports api, which is not to its left",
    ("masks.base", "from .. import api"): "imports api, which is not to its left",
    ("masks.base", "from ..executors import cpu"): "imports executors.cpu, which is not to its left",
    ("masks.base", "from cuflash.executors import cpu"): "imports executors.cpu, which is not to its left",
    ("masks.base", "import cuflash.executors.cpu"): "imports executors.cpu, which is not to its left",
    ("masks.base", "from .. import attention"): "imports cuflash, which is not to its left",
    ("masks.base", "from .base import Band"): "imports masks.base, which is not to its left",
    ("errors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .arrays import Array"):
        "imports arrays, which is not to its left",
    ("api", "from .testing.strategies import arrays"): "imports testing.strategies, which is not to its left",
    ("api", "from .errors import _private"): "takes _private out of errors",
    ("api", "from .nowhere import x"): "imports cuflash.nowhere, which is no room",
    ("reference", "from .masks.base import Band"): "imports masks.base, from which it is kept apart",
    ("testing.oracle", "from ..executors.cpu import forward"): "imports executors.cpu, from which it is kept apart",
    ("executors.cpu", "from ..compiler.source import source"): "imports compiler.source, from which it is kept apart",
    ("api", "import pickle"): "imports pickle",
    ("api", "np.load(f, allow_pickle=True)"): "allows pickles",
    ("api", "eval('1')"): "calls eval",
    ("executors.cpu", "import os\nos.environ['X']"): "reads the environment",
    ("compiler.nvrtc", "import os\ndef _dump(): return os.environ['X']"): "reads the environment",
    ("executors.checks", "import os\ndef built(): return os.environ['X']"): "reads the environment",
    ("plans", "import os\ndef is_on(): return os.environ['X']"): "reads the environment",
    ("compiler.nvrtc", "import os\nX = os.getenv('X')\ndef _environment(): return os.environ"):
        "reads the environment",
    ("compiler.nvrtc", "import cupy"): "imports cupy before it is needed",
    ("compiler.nvrtc", "from cuda.core import Program"): "imports cuda.core before it is needed",
    ("compiler.nvrtc", "spec.head_dim > 64"): "speaks of head_dim",
    ("planning.device", "def f(head_dim): ..."): "speaks of head_dim",
    ("plans", "if problem.head_dim > 64: pass"): "speaks of head_dim",
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
        ("masks.arrays", "from .base import Band\nfrom ..errors import UnsupportedProblem"),
        ("cuflash", "from . import masks\nfrom .api import attention\nfrom .diagnosis import doctor"),
        ("testing.properties", "from hypothesis import given\nfrom .. import masks, attention\nfrom .oracle import x"),
        ("testing", "from .oracle import check\nfrom . import strategies"),
        ("compiler.nvrtc", "import os\ndef _environment(): return os.environ"),
        ("compiler.nvrtc", "def _cupy():\n    import cupy\n    return cupy"),
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
assert (abs(cuflash.attention(q, q, q, causal=True) - 1) <= np.finfo(np.float32).eps).all()  # means of ones
o, vjp = cuflash.attention_vjp(q, q, q, mask=cuflash.masks.Causal())
assert vjp(o).dq.shape == q.shape
print("fine")
"""


def test_cuflash_works_without_gpu_packages_and_test_packages() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.returncode) == ("fine\n", 0), run.stderr
