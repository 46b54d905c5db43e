"""Kernels compile anywhere and load once; each fault of CuPy's cache, of packages or of processes is explained."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuflash
import pytest
from cuflash import UnsupportedProblem
from cuflash.diagnosis import doctor
from cuflash.errors import CompileError
from cuflash.compiler import nvrtc as room
from cuflash.planning.spec import KernelSpec
from cuflash.compiler.source import source
from cupy_double import MACHINE_CODE, MOST_BYTES, STATIC_BYTES, CUDADriverError, CUDARuntimeError, Double, Module

ROOT = Path(__file__).parents[2]
HOPPER = (9, 0)
Make = Callable[..., KernelSpec]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the module to the state of a process that has compiled nothing."""
    started = {"_loaded": {}, "_compiled": {}, "_process": None, "_is_started": False, "_has_warned": False}
    for name, value in started.items():
        monkeypatch.setattr(room, name, value)
    for name in ("CUFLASH_DUMP", "CUPY_CACHE_DIR", "CUPY_CACHE_IN_MEMORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cupy(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    double = Double(tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "cupy", double)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(double.cache))
    yield double


# Architectures.


@pytest.mark.parametrize(
    ("family", "capability", "name"),
    [
        ("simt", (7, 5), "sm_75"),
        ("simt", (12, 0), "sm_120"),
        ("sm80", (8, 6), "sm_86"),
        ("sm80", (9, 0), "sm_90"),
        ("sm80", (10, 0), "sm_100"),
        ("sm90", (9, 0), "sm_90a"),
    ],
)
def test_a_family_is_compiled_for_its_chip(spec: Make, family: str, capability: tuple[int, int], name: str) -> None:
    assert room.architecture(spec(family=family), capability) == name


@pytest.mark.parametrize(
    ("family", "capability", "wanted"),
    [
        ("simt", (7, 0), "7.5 or newer"),
        ("sm80", (7, 5), "8.0 or newer"),
        ("sm90", (8, 9), "9.0;"),
        ("sm90", (10, 0), "9.0;"),
    ],
)
def test_a_family_refuses_other_chips(spec: Make, family: str, capability: tuple[int, int], wanted: str) -> None:
    with pytest.raises(UnsupportedProblem, match=wanted):
        room.architecture(spec(family=family), capability)


# Without a GPU.


def test_a_cubin_needs_no_gpu_and_no_temporary_file(
    nvrtc: Any, kernels: Path, spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    compiled = room.cubin(spec("plain"), "sm_90")
    assert compiled.code.startswith(MACHINE_CODE) and compiled.advisories == () and not compiled.is_from_cache
    assert compiled.resources.registers > 0 and compiled.resources[1:] == (0, 0, 0)


def _sections(elf: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit ELF file by name."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, number, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + size * index) for index in range(number)]
    strings = headers[names][4]
    return {
        elf[strings + name : elf.index(b"\0", strings + name)].decode(): elf[place : place + length]
        for name, _, _, _, place, length in headers
    }


def test_a_cubin_is_what_cupy_would_run(nvrtc: Any, kernels: Path, spec: Make) -> None:
    from cuda.bindings import nvrtc as compiler

    path = kernels / "simt" / "plain.cu"
    text = path.read_text().replace("Element(0)", "Element(params.shape.softmax_scale) * 1.5f")
    path.write_text(text + 'static_assert(__cplusplus == 201703L, "C++17");\n')
    # CuPy adds the last three options to ours.
    ours = (*room._OPTIONS, "-arch=sm_90")
    options = [*ours, "-ftz=true", "-arch=sm_90", "--device-as-default-execution-space"]
    _, program = compiler.nvrtcCreateProgram(source(spec("plain")).encode(), b"simt_plain.cu", 0, [], [])
    (status,) = compiler.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = compiler.nvrtcGetCUBINSize(program)
    code = b" " * size
    compiler.nvrtcGetCUBIN(program, code)
    wanted, got = _sections(code), _sections(room.cubin(spec("plain"), "sm_90").code)
    assert status == 0 and got.keys() == wanted.keys() and ".debug_line" in got
    assert got[".text.simt_plain"] == wanted[".text.simt_plain"]


def test_spills_are_counted(nvrtc: Any, kernels: Path, spec: Make) -> None:
    registers, stack_bytes, _, spill_bytes = room.cubin(spec("spills"), "sm_90").resources
    assert registers == 32 and stack_bytes > 0 and spill_bytes is not None and spill_bytes > 0


def test_shared_memory_is_counted(nvrtc: Any, kernels: Path, spec: Make) -> None:
    path = kernels / "simt" / "plain.cu"
    reads_shared = "  __shared__ float s[300];\n  s[threadIdx.x] = clock64();\n  __syncthreads();\n"
    text = path.read_text().replace("Element(0)", "Element(s[127 - threadIdx.x])")
    path.write_text(text.replace("  static_cast", f"{reads_shared}  static_cast"))
    assert 1200 <= room.cubin(spec("plain"), "sm_90").resources.shared_bytes < 2400  # sm_90 may reserve 1 KiB


def test_advisories_of_ptxas_are_seen(nvrtc: Any, kernels: Path, spec: Make) -> None:
    compiled = room.cubin(spec("serialised", family="sm90"), "sm_90a")
    assert any("(C75" in line for line in compiled.advisories)


def test_an_error_names_kernel_architecture_file_line_and_what_to_do(nvrtc: Any, kernels: Path, spec: Make) -> None:
    with pytest.raises(CompileError) as caught:
        room.cubin(spec("broken"), "sm_90")
    message = str(caught.value)
    assert "simt_broken" in message and "does not compile for sm_90" in message
    assert "kernels_cu/simt/broken.cu(4): error" in message and "CUFLASH_DUMP=<folder>" in message
    assert "no_such_member" in caught.value.log


def test_a_long_log_is_shown_in_part(kernels: Path, spec: Make) -> None:
    error = CompileError("simt_x", "sm_90", "\n".join(f"line {i}" for i in range(100)))
    assert "line 39\n... 60 more lines in .log" in str(error) and "line 99" in error.log


def test_the_text_is_dumped_on_request(
    nvrtc: Any, kernels: Path, spec: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFLASH_DUMP", str(tmp_path / "new" / "folder"))
    with pytest.raises(CompileError) as caught:
        room.cubin(spec("broken"), "sm_90")
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert caught.value.text == str(path) and str(path) in str(caught.value)
    assert path.read_text() == source(spec("broken")) and path.name.startswith("simt_broken-sm_90-")


def test_records_that_are_not_laid_out_as_their_twins_stop_the_compiler(nvrtc: Any, kernels: Path, spec: Make) -> None:
    path = kernels / "attention" / "params.cuh"
    text = path.read_text()
    path.write_text(text.replace("int64_t head_stride;", "int32_t head_stride;"))  # moves no field's offset
    assert path.read_text() != text
    with pytest.raises(CompileError, match='"Matrices.head_stride"'):
        room.cubin(spec("plain"), "sm_90")


def test_an_architecture_that_nvrtc_does_not_know_says_what_to_install(nvrtc: Any, kernels: Path, spec: Make) -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC 13\.\d+ does not compile for sm_990: install a newer version"):
        room.cubin(spec("plain"), "sm_990")


@pytest.mark.parametrize("package", ["cuda.bindings", "cuda.core"])
def test_a_missing_package_says_what_to_install(
    nvrtc: Any, kernels: Path, spec: Make, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=r"is missing .*pip install '\.\[cuda13\]'"):
        room.cubin(spec("plain"), "sm_90")


def test_a_missing_nvrtc_says_what_to_install(nvrtc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13": No such file\nmore\n')

    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", absent)
    with pytest.raises(RuntimeError, match=r"NVRTC is missing \(Failure finding .*pip install"):
        room.nvrtc_version()


def test_many_kernels_compile_at_once(nvrtc: Any, kernels: Path, spec: Make) -> None:
    specs = [spec("plain", head_dim=dim) for dim in (32, 64, 128)]
    report = room.precompile(specs, "sm_86")
    assert [each.spec for each in report] == specs and all(each.code for each in report)
    recorded = room.cache_info().compiled
    assert {each.spec for each in recorded} == set(specs) and not any(each.code for each in recorded)


# On a simulated GPU.


def test_the_first_call_compiles_and_later_ones_find_it(cupy: Double, spec: Make) -> None:
    function = room.kernel(spec("plain"), HOPPER)
    assert function.name == "simt_plain" and room.kernel(spec("plain"), HOPPER) is function
    assert cupy.compiled == [source(spec("plain"))]
    assert cupy.options == [("-std=c++17", "-lineinfo", "-arch=sm_90")]


def test_each_device_has_its_own(cupy: Double, spec: Make) -> None:
    first = room.kernel(spec("plain"), HOPPER)
    with cupy.cuda.Device(1):
        assert room.kernel(spec("plain"), HOPPER) is not first
    assert len(cupy.functions) == 2 and len(cupy.compiled) == 1  # the second compilation was served from the disk cache


def test_threads_that_ask_for_one_kernel_compile_it_once(cupy: Double, spec: Make) -> None:
    cupy.seconds = 0.05
    with ThreadPoolExecutor(16) as pool:
        functions = set(pool.map(lambda _: id(room.kernel(spec("plain"), HOPPER)), range(16)))
    assert (len(functions), len(cupy.compiled)) == (1, 1)


def test_threads_that_ask_for_several_kernels_do_not_wait_for_each_other(cupy: Double, spec: Make) -> None:
    cupy.seconds = 0.2
    specs = [spec("plain", head_dim=dim) for dim in (32, 64, 96, 128)]
    together = threading.Barrier(4)

    def ask(wanted: KernelSpec) -> None:
        together.wait()
        room.kernel(wanted, HOPPER)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, specs))
    assert cupy.most_at_once > 1 and len(cupy.compiled) == 4


def test_a_failure_is_not_remembered(cupy: Double, spec: Make, kernels: Path) -> None:
    path = kernels / "simt" / "broken.cu"
    for _ in range(2):
        with pytest.raises(CompileError, match=r"kernels_cu/simt/broken.cu\(4\)"):
            room.kernel(spec("broken"), HOPPER)
    path.write_text(path.read_text().replace("no_such_member", "shape"))
    cuflash.compiler.source.source.cache_clear()
    assert room.kernel(spec("broken"), HOPPER).name == "simt_broken"


def test_shared_memory_is_asked_for_only_beyond_48_kib(cupy: Double, spec: Make) -> None:
    function = room.kernel(spec("plain"), HOPPER, shared_bytes=48 << 10)
    assert function.allowed == 48 << 10
    room.kernel(spec("plain"), HOPPER, shared_bytes=100_000)
    assert function.allowed == 100_000
    # the limit does not fall, since another launch may rely on it
    room.kernel(spec("plain"), HOPPER, shared_bytes=60_000)
    assert function.allowed == 100_000 and len(cupy.compiled) == 1


def test_too_much_shared_memory_names_the_numbers(cupy: Double, spec: Make) -> None:
    wanted = f"needs {MOST_BYTES} bytes of dynamic and {STATIC_BYTES} bytes of static .*; a block .* has {MOST_BYTES}"
    with pytest.raises(RuntimeError, match=wanted):
        room.kernel(spec("plain"), HOPPER, shared_bytes=MOST_BYTES)


def test_kernels_are_loaded_ahead_on_the_callers_device(cupy: Double, spec: Make) -> None:
    specs = [spec("plain", head_dim=dim) for dim in (32, 64)]
    with cupy.cuda.Device(1):
        report = room.precompile(specs, HOPPER)
        room.kernel(specs[0], HOPPER)
    assert [each.spec for each in report] == specs and len(cupy.compiled) == 2
    assert [function.device for function in cupy.functions] == [1, 1]


def test_the_longest_text_is_compiled_first(cupy: Double, spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    specs = [spec("plain", head_dim=dim) for dim in (8, 128, 64)]
    assert [each.spec for each in room.precompile(specs, HOPPER)] == specs
    assert cupy.compiled == [source(specs[1]), source(specs[2]), source(specs[0])]


def test_the_cache_is_described(cupy: Double, spec: Make) -> None:
    room.kernel(spec("plain"), HOPPER)
    with cupy.cuda.Device(1):
        room.kernel(spec("plain"), HOPPER)
    info = cuflash.cache_info()
    assert (info.folder, info.entries) == (cupy.cache, 1) and info.nbytes == sum(
        path.stat().st_size for path in cupy.cache.iterdir()
    )
    assert [each.is_from_cache for each in info.compiled] == [False, True]
    assert info.compiled[0].resources == (40, 0, STATIC_BYTES, None)
    assert str(cupy.cache) in str(info) and "sm_90: CuPy's cache in" in str(info)


# Faults of the cache. File permissions do not restrict root, which may run the tests, so other faults replace them.


def _entry(cache: Path) -> Path:
    (entry,) = cache.glob("*.cubin")
    return entry


def _truncate(cache: Path) -> None:
    _entry(cache).write_bytes(_entry(cache).read_bytes()[:-1])


def _cut(sixteenths: int) -> Callable[[Path], None]:
    def damage(cache: Path) -> None:
        data = _entry(cache).read_bytes()
        _entry(cache).write_bytes(data[: len(data) * sixteenths // 16])

    damage.__name__ = f"_cut_to_{sixteenths}_16"
    return damage


def _remove_the_digest(cache: Path) -> None:
    _entry(cache).write_bytes(_entry(cache).read_bytes()[40:])


def _flip_a_bit(cache: Path) -> None:
    data = bytearray(_entry(cache).read_bytes())
    data[-1] ^= 1
    _entry(cache).write_bytes(data)


def _forge(cache: Path) -> None:
    _entry(cache).write_bytes(hashlib.sha1(b"no machine code").hexdigest().encode() + b"no machine code")


def _compile_another_kernel(cache: Path) -> None:
    code = MACHINE_CODE + b"of another kernel or for another chip"
    _entry(cache).write_bytes(hashlib.sha1(code).hexdigest().encode() + code)


def _put_a_folder_in_its_place(cache: Path) -> None:
    entry = _entry(cache)
    entry.unlink()
    entry.mkdir()


def _remove_all(cache: Path) -> None:
    _entry(cache).unlink()
    cache.rmdir()


def _put_a_file_there(cache: Path) -> None:
    _remove_all(cache)
    cache.write_text("not a folder")


MENDED = [_truncate, _flip_a_bit, _remove_the_digest]  # by CuPy
PASSED = [_forge, _put_a_folder_in_its_place, _remove_all, _put_a_file_there]  # by us


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the module to the state of a new process."""
    monkeypatch.setattr(room, "_loaded", {})
    monkeypatch.setattr(room, "_has_warned", False)


@pytest.mark.parametrize("damage", [*MENDED, *map(_cut, range(16))])
def test_a_damaged_entry_is_made_again(
    cupy: Double, spec: Make, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    room.kernel(spec("plain"), HOPPER)
    damage(cupy.cache)
    _forget(monkeypatch)
    assert room.kernel(spec("plain"), HOPPER).name == "simt_plain" and len(cupy.compiled) == 2


# On a GPU the driver would read past the end of what only starts as machine code does: it does not know the size.
@pytest.mark.parametrize("damage", [*PASSED, _compile_another_kernel])
def test_a_broken_cache_is_passed_with_one_warning(
    nvrtc: Any, cupy: Double, spec: Make, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    room.kernel(spec("plain"), HOPPER)
    damage(cupy.cache)
    _forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="CuPy's cache does not work .* compiled again") as caught:
        function = room.kernel(spec("plain"), HOPPER)
        assert room.kernel(spec("plain"), HOPPER) is function
        with cupy.cuda.Device(1):
            room.kernel(spec("plain"), HOPPER)
    assert function.module.code == room.cubin(spec("plain"), "sm_90").code and len(caught) == 1


@pytest.mark.parametrize("place", ["_read", "_write"])
@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "ENAMETOOLONG", "ESTALE"])
def test_a_cache_that_can_neither_be_read_nor_written_is_passed_with_one_warning(
    nvrtc: Any, cupy: Double, spec: Make, monkeypatch: pytest.MonkeyPatch, place: str, name: str
) -> None:
    code = getattr(errno, name)

    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cupy, place, fail)
    with pytest.warns(RuntimeWarning, match=f"CuPy's cache does not work .*{os.strerror(code)}") as caught:
        functions = [room.kernel(spec("plain", head_dim=dim), HOPPER) for dim in (32, 64)]
    assert len(caught) == 1 and all(each.module.code.startswith(MACHINE_CODE) for each in functions)


def test_what_the_driver_does_not_load_in_either_way_is_no_fault_of_the_cache(
    nvrtc: Any, cupy: Double, spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Module, code: bytes) -> None:
        raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")

    monkeypatch.setattr(Module, "load", load)
    with pytest.raises(RuntimeError, match=r"the driver does not load simt_plain.* by NVRTC 13\.\d+ .*INVALID_IMAGE"):
        room.kernel(spec("plain"), HOPPER)


def test_a_folder_that_cannot_be_made_does_not_stop_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    with pytest.warns(RuntimeWarning, match="cannot be made"):
        room._redirect_cupy_cache()
    assert Path(os.environ["CUPY_CACHE_DIR"]).is_dir() and room.cache_info().folder is None


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_folder_that_changes_or_cannot_be_read_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_gone: bool
) -> None:
    def stat() -> os.stat_result:
        raise FileNotFoundError if is_gone else PermissionError("Permission denied")

    path = tmp_path / f"{'0f' * 20}.cubin"
    path.write_bytes(b"12345")
    other = SimpleNamespace(name=f"{'0e' * 20}.cubin", stat=stat)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    scandir = os.scandir
    # pathlib of Python 3.13 lists other folders by this function, too.
    monkeypatch.setattr(os, "scandir", lambda at: [*scandir(at), other] if Path(at) == tmp_path else scandir(at))
    if is_gone:
        assert (room.cache_info().entries, room.cache_info().nbytes) == (1, 5)
        return
    with pytest.raises(RuntimeError, match="cache folder .* cannot be read .*denied.*: set CUPY_CACHE_DIR to a folder"):
        room.cache_info()
    assert "set CUPY_CACHE_DIR" in doctor()["kernel cache"].advice


@pytest.mark.parametrize("place", ["file", "file/inside"])
def test_a_folder_for_texts_that_cannot_be_made_is_named(
    nvrtc: Any, kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: Make, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFLASH_DUMP", str(tmp_path / place))
    with pytest.raises(RuntimeError, match="CUFLASH_DUMP must name a writable folder; got .*: name a different"):
        room.cubin(spec("plain"), "sm_80")


# Machines and processes that lack a requirement.


def test_a_missing_cupy_says_what_to_install(spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"CuPy is missing .*pip install '\.\[cuda13\]'"):
        room.kernel(spec("plain"), HOPPER)


def test_a_missing_nvrtc_of_cupy_says_what_to_install(cupy: Double, spec: Make) -> None:
    def absent() -> None:
        raise RuntimeError("Failure finding libnvrtc")

    cupy.cuda.nvrtc.getVersion = absent
    with pytest.raises(RuntimeError, match=r"NVRTC is missing \(Failure finding libnvrtc\): pip install"):
        room.kernel(spec("plain"), HOPPER)


def test_a_missing_gpu_is_said(cupy: Double, spec: Make) -> None:
    def absent() -> None:
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    cupy.cuda.runtime.getDevice = absent
    with pytest.raises(RuntimeError, match="no usable GPU .cudaErrorNoDevice.*python -m cuflash"):
        room.kernel(spec("plain"), HOPPER)


FORKS = """
import os, sys, pathlib
sys.path[:0] = [{tests!r}]
import numpy as np, cupy_double
from cuflash.compiler import nvrtc as room, source
from cuflash.planning.spec import Entry, KernelSpec
source.KERNELS = pathlib.Path({kernels!r})
sys.modules["cupy"] = cupy_double.Double(pathlib.Path({cache!r}))
spec = KernelSpec(entry=Entry(family="simt", name="plain"), dtype=np.dtype(np.float32),
                         head_dim=64, value_dim=64, block_q=32, block_kv=32)

def in_child():
    if (child := os.fork()) == 0:
        try:
            room.kernel(spec, (9, 0))
            print("used", flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)

in_child()                  # nothing was used yet: the child may be the first
room.kernel(spec, (9, 0))
room._guard.acquire()       # as if another thread were compiling: the child must not wait for it
in_child()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_is_told_to_spawn(kernels: Path, tmp_path: Path) -> None:
    code = FORKS.format(tests=str(ROOT / "tests" / "support"), kernels=str(kernels), cache=str(tmp_path / "cache"))
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    first, second = run.stdout.splitlines()
    assert first == "used" and "does not survive a fork" in second and "spawn" in second, run.stderr


# On a real GPU.

REAL = """
import pathlib, warnings
import numpy as np
from cuflash import cache_info
from cuflash.compiler import nvrtc as room, params_layout as records, source
from cuflash.planning.spec import Entry, KernelSpec
source.KERNELS = pathlib.Path({kernels!r})
spec = KernelSpec(entry=Entry(family="simt", name="plain"), dtype=np.dtype(np.float32),
                         head_dim=64, value_dim=64, block_q=32, block_kv=32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cupy = room._cupy()
    device = cupy.cuda.Device()
    {damage}
    function = room.kernel(spec, tuple(map(int, (device.compute_capability[:-1], device.compute_capability[-1]))))
o = cupy.asarray(np.ones(128, np.float32))  # a copy: a kernel of CuPy's own would meet the broken cache too
record = np.zeros(1, records.PARAMS)
record["o"]["data"] = o.data.ptr
function((1,), (128,), (record,))
assert not o.get().any()
made, = cache_info().compiled
print(made.is_from_cache, made.resources.registers > 0, sum(issubclass(w.category, RuntimeWarning) for w in caught))
"""


def _run_real(kernels: Path, cache: Path, damage: str = "") -> str:
    code = REAL.format(kernels=str(kernels), damage=damage)
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.gpu
def test_a_kernel_runs_and_the_next_process_finds_it_in_the_cache(kernels: Path, tmp_path: Path) -> None:
    assert _run_real(kernels, tmp_path / "cache") == "False True 0"
    assert _run_real(kernels, tmp_path / "cache") == "True True 0"


@pytest.mark.gpu
@pytest.mark.parametrize("damage", MENDED)
def test_cupy_makes_a_damaged_entry_again(kernels: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    _run_real(kernels, tmp_path / "cache")
    damage(tmp_path / "cache")
    assert _run_real(kernels, tmp_path / "cache") == "False True 0"


@pytest.mark.gpu
@pytest.mark.parametrize("damage", PASSED)
def test_a_broken_cache_of_cupy_is_passed(kernels: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    cache = tmp_path / "cache"
    _run_real(kernels, cache)
    if damage is _remove_all:  # while CuPy runs, because it creates the folder when it is imported
        assert _run_real(kernels, cache, f"import shutil; shutil.rmtree({str(cache)!r})") == "False True 1"
        return
    damage(cache)
    assert _run_real(kernels, cache) == "False True 1"


@pytest.mark.gpu
def test_what_is_compiled_again_beside_a_driver_is_not_from_its_cache(kernels: Path, spec: Make) -> None:
    first, again = (room.cubin(spec("plain"), "sm_90") for _ in range(2))
    assert again.code == first.code and again.resources == first.resources


@pytest.mark.gpu
def test_a_real_error_names_file_and_line(kernels: Path, spec: Make) -> None:
    import cupy

    major, minor = map(int, (cupy.cuda.Device().compute_capability[:-1], cupy.cuda.Device().compute_capability[-1]))
    with warnings.catch_warnings(), pytest.raises(CompileError, match=r"kernels_cu/simt/broken.cu\(4\): error"):
        room.kernel(spec("broken"), (major, minor))


@pytest.mark.gpu
def test_a_kernel_may_take_what_a_block_has_and_no_more(kernels: Path, spec: Make) -> None:
    import cupy

    device = cupy.cuda.Device()
    capability = int(device.compute_capability[:-1]), int(device.compute_capability[-1])
    most = device.attributes["MaxSharedMemoryPerBlockOptin"]
    room.kernel(spec("plain"), capability, shared_bytes=most)
    with pytest.raises(RuntimeError, match=f"a block of this GPU has {most}"):
        room.kernel(spec("plain"), capability, shared_bytes=most + 1024)
