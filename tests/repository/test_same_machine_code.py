"""The comparison of machine code: names and comments make no difference, and every other difference is named."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cuflash.compiler import nvrtc as compiling
from cuflash.compiler import source as sources
from cuflash.compiler.source import KernelSpec

ROOT = Path(__file__).parents[2]
OPTIONS = ("-arch=sm_90", "--generate-line-info", "--std=c++17")

# Contains a function that is called, a constant array, static shared memory, a variable whose address is read, and a
# stack.
TEXT = """
__constant__ float weights[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__device__ int counts[2] = {5, 6};
constexpr int kUnread = 3;
__device__ __noinline__ float scaled(float x, int index) { return x * weights[index & 3] + 0.5f; }
extern "C" __global__ void __launch_bounds__(128) first(float* data, int index) {
  __shared__ float rows[256];
  float spilled[128];
  for (int i = 0; i < 128; ++i) spilled[i] = data[i];
  spilled[index & 31] = 0;
  rows[threadIdx.x] = scaled(data[threadIdx.x], index);
  __syncthreads();
  data[threadIdx.x] = rows[255 - threadIdx.x] + spilled[index >> 8 & 127];
  atomicAdd(&counts[index & 1], 1);
}
"""


@pytest.fixture(scope="module")
def proof() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "experiments" / "proof"))
        yield importlib.import_module("same_machine_code")


@pytest.fixture(scope="module")
def before(nvrtc: Any, proof: ModuleType) -> Any:
    """Return the compiled functions of TEXT."""
    return proof.compiled(TEXT, OPTIONS)


@pytest.fixture
def fields(proof: ModuleType, before: Any) -> Callable[..., set[tuple[str, str]]]:
    """Return a function that lists function and field of each difference that an edit of TEXT causes."""

    def changed(old: str, new: str) -> set[tuple[str, str]]:
        assert old in TEXT
        after = proof.compiled(TEXT.replace(old, new), OPTIONS)
        return {(each.function, each.field) for each in proof.differences("kernel", before, after)}

    return changed


def test_a_cubin_is_read_as_its_compiler_describes_it(
    nvrtc: Any, proof: ModuleType, kernels: Path, spec: Callable[..., KernelSpec]
) -> None:
    path = kernels / "simt" / "spills.cu"
    path.write_text(path.read_text("utf-8").replace("float values[96];", "__shared__ int x[300]; float values[96];\n"
                    "  x[threadIdx.x % 300] = 1; __syncthreads(); data[threadIdx.x] = x[7];"), "utf-8")  # fmt: skip
    sources.source.cache_clear()
    for name, architecture in (("plain", "sm_75"), ("spills", "sm_75"), ("plain", "sm_100"), ("spills", "sm_100")):
        compiled = compiling.cubin(spec(name), architecture)
        (function,) = proof.cubin.functions(compiled.code).values()
        numbers = [function[field] for field in ("registers", "stack bytes", "shared bytes")]
        assert numbers[:2] == list(compiled.resources[:2])
        assert numbers[2] in (compiled.resources.shared_bytes, compiled.resources.shared_bytes + 1024)
        assert function["barriers"] == (name == "spills")
        assert len(function["instructions"]) % 16 == 0 and function["instructions"] in compiled.code
        # this constant bank contains Params
        assert any(len(value) > 700 for field, value in function.items() if field == "constant bank 0")


def test_memory_of_each_kind_is_read(before: Any) -> None:
    (function,) = before.values()
    assert function["stack bytes"] == 512 and function["barriers"] == 1
    assert function["shared bytes"] == 1024 + 256 * 4  # sm_90 reserves the first 1024 bytes
    assert function["constant bank 3"].hex() == "0000803f000000400000404000008040"
    assert "8 bytes 0500000006000000" in " ".join(function["relocations of constant bank 4"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first", "zeroth_kernel"),
        ("scaled", "a_better_name"),
        ("weights", "zzz"),
        ("counts", "of_each"),
        ("rows", "staged"),
        ("extern", "// a comment\n\n\nextern"),
        ("__syncthreads();", "__syncthreads();  // all rows are stored"),
        ("first(", "first /* a name */ ("),
    ],
)
def test_names_and_comments_make_no_difference(fields: Any, old: str, new: str) -> None:
    assert fields(old, new) == set()


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("0.5f", "0.25f", "instructions"),
        ("255 - threadIdx.x", "threadIdx.x", "instructions"),
        ("4.0f}", "4.5f}", "constant bank 3"),
        ("rows[256]", "rows[512]", "shared bytes"),
        ("spilled[128]", "spilled[256]", "stack bytes"),
        ("__syncthreads();", "__syncwarp();", "barriers"),
        ("__noinline__", "__forceinline__", "registers"),
        ("float* data, int index", "float* data, int index, int unread", "constant bank 0"),
        ("__launch_bounds__(128)", "__launch_bounds__(256)", "attribute 0x5"),
        ("counts[2] = {5, 6}", "counts[2] = {5, 7}", "relocations of constant bank 4"),
    ],
)
def test_what_changes_the_code_is_named(fields: Any, old: str, new: str, field: str) -> None:
    assert ("kernel", field) in fields(old, new)


def test_what_was_compiled_is_kept_by_all_that_is_not_a_comment(
    nvrtc: Any, proof: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = proof.cached_functions(tmp_path, TEXT, OPTIONS)
    monkeypatch.setattr(proof, "compiled", lambda *_: pytest.fail("compiled again"))
    commented = '#line 7 "elsewhere"\n' + TEXT.replace("};\n", "}; /* a\ncomment */ // and another\n\n")
    assert proof.cached_functions(tmp_path, commented, OPTIONS) == functions
    for text, options in ((TEXT.replace("0.5f", "0.25f"), OPTIONS), (TEXT, OPTIONS[:2])):
        with pytest.raises(pytest.fail.Exception, match="compiled again"):
            proof.cached_functions(tmp_path, text, options)
    assert proof.bare('f("// kept"); // dropped\n') == 'f("// kept");'


def test_the_quick_choice_has_whatever_one_kernel_has(proof: ModuleType) -> None:
    dims, flags, dtypes = ("64", "128", "256"), ("False", "True"), ("float16", "bfloat16")
    kernels = [
        proof.Kernel(f"sm90_{name}", "sm_90a", (("dtype", dtype), ("head_dim", dim), ("is_listed", flag)))
        for name in ("forward", "backward") for dtype in dtypes for dim in dims for flag in flags
    ]  # fmt: skip
    chosen = proof.quick(kernels)
    values = [{(kernel.name, pair) for kernel in side for pair in kernel.specification} for side in (kernels, chosen)]
    assert values[0] == values[1] and len(chosen) < len(kernels)


_GATE = """
from dataclasses import dataclass
from types import SimpleNamespace

@dataclass(frozen=True)
class Spec:
    family: str
    entry: str
    dtype: str
    NAME: int
    shared_bytes: int

def cubin(spec, architecture):
    from cuda.core import Program, ProgramOptions
    text = open(__file__.replace("test_kernels_compile.py", "kernel.cu")).read().replace("WIDTH", str(spec.NAME))
    return Program(text, "c++", options=ProgramOptions(arch=architecture, std="c++17")).compile("cubin")

room = SimpleNamespace(cubin=cubin)

def every_target():
    return [(Spec("simt", "copy", "float32", width, 4 * width), "sm_90") for width in (32, 64)]

def every_spec(name, dims, limits=(None,)):
    return set()
"""


def test_two_trees_are_compared_from_end_to_end(
    nvrtc: Any, proof: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, record = tmp_path / "tree", tmp_path / "record.json"
    (tree / "tests" / "kernels").mkdir(parents=True)
    gate, text = tree / "tests" / "kernels" / "test_kernels_compile.py", tree / "tests" / "kernels" / "kernel.cu"
    gate.write_text(_GATE.replace("NAME", "block_q"))
    text.write_text('extern "C" __global__ void copy(float* to) { to[threadIdx.x] = WIDTH; }\n')
    git = ("git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@y")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        subprocess.run([*git, *command], check=True)
    arguments = ["HEAD", "--cache", str(tmp_path / "cache"), "--json", str(record), "--workers", "1"]

    gate.write_text(_GATE.replace("NAME", "rows"))
    text.write_text('extern "C" __global__ void copied(float* x) { x[threadIdx.x] = WIDTH; }  // renamed\n')
    assert proof.main([*arguments, "--renamed", "block_q=rows"], tree) == 0
    reported = "2 kernels of 1 architectures compared with HEAD, 0 by equal text: the same machine code"
    assert reported in capsys.readouterr().out
    assert json.loads(record.read_text())["differences"] == []

    gate.write_text(_GATE.replace("NAME", "block_q").replace("4 * width", "8 * width").replace("64)", "96)"))
    text.write_text('extern "C" __global__ void copy(float* to) { to[threadIdx.x] = WIDTH + 1; }\n')
    assert proof.main(arguments, tree) == 1
    differing = json.loads(record.read_text())["differences"]
    reported = {(each["function"], each["field"], each["before"], each["after"]) for each in differing}
    assert ("kernel", "specification", "there", "missing") in reported  # block_q = 64
    assert ("kernel", "specification", "missing", "there") in reported  # block_q = 96
    assert {each["field"] for each in differing} == {"specification", "instructions", "dynamic shared bytes"}
    assert "differ" in capsys.readouterr().out

    with pytest.raises(SystemExit, match="BASE must be a commit of .*; got 'nothing'"):
        proof.main(["nothing"], tree)
    with pytest.raises(SystemExit, match="none has these: families are .*; architectures are sm_"):
        proof.main(["HEAD", "--families", "sm99"], tree)
