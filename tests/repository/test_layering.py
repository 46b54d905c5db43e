"""Rules on names, calls and words of each layer that import-linter's contracts in setup.cfg cannot express."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cuflash
from cuflash.planning.routing import FAMILIES

ROOT = Path(__file__).parents[2]
LIBRARY = {
    ".".join(path.relative_to(ROOT / "cuflash").with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "cuflash").rglob("*.py"))
}
PACKAGES = {
    "numpy", "cuflash", "cuda", "cupy", "hypothesis", "jax", "matplotlib", "ml_dtypes", "platformdirs", "scipy",
    "threadpoolctl", "torch",
}  # fmt: skip
# Functions that may read environment variables.
ENVIRONMENT = {
    "sim.compiler": {"_run"},
    "compiler.nvrtc": {"_environment", "_redirect_cupy_cache"},
    "compiler.host_cache": {"folder"},
    "executors.checks": {"is_on"},
}
# Names that modules must not mention, because these modules query or transport data but do not decide.
WORDS = {
    "compiler.nvrtc": {"head_dim", "value_dim", "block_q", "block_kv", "seqlen_q", "seqlen_kv"},
    "planning.device": {"head_dim", "seqlen_q", "seqlen_kv"},
    **dict.fromkeys(("plans.conversion", "plans.fit", "plans.plan"), {"head_dim", "block_q", "block_kv"}),
}
NAMES_OF_FAMILIES = {"planning.spec", "planning.options"}
OBJECTS_OF_FAMILIES = {"SIMT", "SM80", "SM90", "FA1", "NAIVE", "family"}
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "legacy", "experimental"}


def rules(room: str, source: str) -> Iterator[str]:
    """Yield the rules that a module's source breaks."""
    tree = ast.parse(source)
    if room != "diagnosis" and _reads_environment(tree, ENVIRONMENT.get(room, set())):
        yield "reads the environment"
    # The package itself imports the modules of its public names from a table.
    banned = {"eval", "exec", "import_module", "__import__"} - ({"import_module"} if room == "__init__" else set())
    for node in ast.walk(tree):
        yield from (f"imports {name}" for name in _imported(node) - PACKAGES - sys.stdlib_module_names)
        if isinstance(node, ast.ImportFrom) and (node.level or _imported(node) == {"cuflash"}):
            yield from (f"takes {each.name}" for each in node.names if each.name[0] == "_" and each.name[:2] != "__")
        if isinstance(node, ast.Call) and _name(node.func) in banned:
            yield f"calls {_name(node.func)}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", True):
            yield "allows pickles"
        if _name(node) in WORDS.get(room, ()):
            yield f"speaks of {_name(node)}"
        if not room.startswith(("planning.families", "planning.routing")) and _compares_families(node):
            yield "compares families"
        # One part of the params record has a family's name.
        if isinstance(node, ast.Constant) and node.value in FAMILIES and room not in NAMES_OF_FAMILIES:
            if (room, node.value) != ("planning._params", "naive"):
                yield f"writes {node.value}"


def _imported(node: ast.AST) -> set[str]:
    """Return the packages that an absolute import names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) and not node.level else set()


def _reads_environment(tree: ast.Module, allowed: set[str]) -> bool:
    inside = {
        id(node)
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name in allowed
        for node in ast.walk(function)
    }
    return any(_name(node) in ("environ", "getenv") and id(node) not in inside for node in ast.walk(tree))


def _compares_families(node: ast.AST) -> bool:
    """True if a node compares a family by name. Other modules must call methods of the family's object."""
    if not isinstance(node, ast.Compare) or any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return False
    sides = (node.left, *node.comparators)
    return any(_name(part) in OBJECTS_OF_FAMILIES for side in sides for part in ast.walk(side))


def _name(node: ast.AST) -> str | None:
    """Return the last word of a name, an attribute or a parameter."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)


def test_every_module_keeps_the_rules() -> None:
    assert [room for room in LIBRARY if SHAPELESS_NAMES & set(room.split("."))] == []
    assert [(room, fault) for room, path in LIBRARY.items() for fault in rules(room, path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("room", "source", "violation"),
    [
        ("api", "from experiments.harness import table", "imports experiments"),
        ("api", "from .errors import _private", "takes _private"),
        ("api", "np.load(f, allow_pickle=True)", "allows pickles"),
        ("api", "eval('1')", "calls eval"),
        ("executors.cpu", "import os\nos.environ['X']", "reads the environment"),
        ("compiler.nvrtc", "import os\nX = os.getenv('X')\ndef _environment(): return os.environ",
         "reads the environment"),
        ("plans.fit", "problem.head_dim > 64", "speaks of head_dim"),
        ("plans", "x = spec.family in (SM80, FA1)", "compares families"),
        ("plans", "x = 'sm90'", "writes sm90"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_caught(room: str, source: str, violation: str) -> None:
    assert list(rules(room, source)) == [violation]


def test_few_modules_are_directly_under_the_package() -> None:
    assert len(list((ROOT / "cuflash").glob("*.py"))) <= 14


def test_the_package_imports_each_public_name_from_where_its_import_statements_say() -> None:
    tree = ast.parse(Path(cuflash.__file__).read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    stated = {alias.name: node.module or alias.name for node in imports for alias in node.names}
    assert sorted(stated) == cuflash.__all__
    # The executors add the kernels that create indexes on a GPU; the class is the same.
    assert {**cuflash._MODULE_OF, "BlockIndex": "blocks.index"} == stated
    assert cuflash.BlockIndex is cuflash.blocks.index.BlockIndex


def test_the_package_lists_its_public_names_and_no_module_bears_that_of_a_function() -> None:
    assert dir(cuflash) == sorted([*cuflash.__all__, "__version__"])
    functions = {name for name in cuflash.__all__ if inspect.isfunction(getattr(cuflash, name))}
    assert functions.isdisjoint(path.stem for path in Path(cuflash.__file__).parent.iterdir())


def test_experiments_never_import_tests() -> None:
    modules = {name.stem for name in (ROOT / "tests").rglob("*.py")} | {"mutations", "tests"}
    for path in (ROOT / "experiments").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        assert not {name for node in nodes for name in _imported(node)} & modules, path


# Runs in a new interpreter in which optional packages cannot be imported, as on a machine where none is installed.
FRESH = """
import importlib, pkgutil, sys
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
needed = "torch", "jax", "testing", "executors.torch_gpu"
for module in pkgutil.walk_packages(cuflash.__path__, "cuflash.", onerror=lambda name: None):
    if not module.name.endswith("__main__") and not module.name.removeprefix("cuflash.").startswith(needed):
        importlib.import_module(module.name)
print("fine")
"""


def test_cuflash_works_and_its_modules_import_without_gpu_packages_and_test_packages() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.returncode) == ("fine\n", 0), run.stderr
