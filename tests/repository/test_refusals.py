"""An experiment that cannot run prints one line to standard error, and exits with a nonzero status."""

from __future__ import annotations

import configparser
import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

ROOT = Path(__file__).parents[2]
command = importlib.import_module("experiments.__main__")
SCRIPTS = {name: path for folder in command.SUBJECTS for name, path in command.scripts(command.FOLDER / folder).items()}
SUPPORT = set(command.scripts(command.FOLDER / "support"))
FOLDERS = [str(command.FOLDER / folder) for folder in command.SUBJECTS]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module("harness")


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the status and message of a command, whose standard error must be one line."""
    try:
        status: Any = command.main(argv)
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):  # Python prints the string, and exits with 1
            print(status, file=sys.stderr)
            status = 1
    message = capsys.readouterr().err
    assert status not in (0, None) and message.count("\n") == 1 and message.strip(), (argv, status, message)
    return status, message


def configured(name: str) -> Any:
    """Return the Config class of an experiment, or None if it parses its own flags."""
    module = importlib.import_module(name)
    config_type = getattr(module, "Config", None)
    is_run = "config_type" in inspect.signature(getattr(module, "main", lambda: None)).parameters
    return config_type if is_run or "parse_config(Config" in SCRIPTS[name].read_text("utf-8") else None


# The list of experiments


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_experiment_tells_its_question_its_finding_and_its_cost(name: str) -> None:
    parts = command.summary(SCRIPTS[name])
    wanted = {"question", "cost"} | ({"found"} if name not in SUPPORT | {"sweep"} else set())
    assert {key for key, text in parts.items() if text} >= wanted


@pytest.mark.parametrize("words", ["cuflash", "experiments", "cuflash roofline --heads 1 --length 8"])
def test_an_output_that_nothing_reads_ends_the_program_quietly(words: str) -> None:
    """A closed pipe, as in ``python -m experiments | head -1``, causes no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        run = subprocess.run(
            [sys.executable, "-m", *words.split()], cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (run.returncode, run.stderr) == (1, "")


# Flags


@pytest.mark.parametrize("name", [name for name, path in SCRIPTS.items() if "Parser(" in path.read_text("utf-8")])
def test_an_unknown_flag_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], harness: ModuleType
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert refused([name, "--no-such-flag"], capsys)[0] == 2


def wrong_values(kind: Any, default: Any) -> Iterator[str]:
    """Yield texts of values that no field of a type accepts."""
    several = typing.get_origin(kind) is tuple
    element = typing.get_args(kind)[0] if several else kind
    takes_zero = 0 in (default if several else (default,))
    if element is int:
        yield "-1" if takes_zero else "0"
    if element is float:
        yield from ("nan", "-1.0")


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_flag_writes_among_tracked_files_unless_told(name: str, harness: ModuleType) -> None:
    if (config_type := configured(name)) is None:
        pytest.skip("it has no configuration")
    paths = [field.default for field in dataclasses.fields(config_type) if isinstance(field.default, Path)]
    assert [path for path in paths if not path.is_relative_to(ROOT / "build")] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_number_out_of_range_is_refused(
    name: str, harness: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    if (config_type := configured(name)) is None:
        pytest.skip("it has no configuration")
    types = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        flag = "--" + field.name.replace("_", "-")
        for text in wrong_values(types[field.name], field.default):
            with pytest.raises(SystemExit) as ended:
                harness.parse_config(config_type, "", [f"{flag}={text}"])
            message = capsys.readouterr().err
            assert ended.value.code == 2 and message.count("\n") == 1, (flag, text, message)
            assert field.name in message or flag in message, message


@pytest.mark.parametrize(
    ("name", "flags", "complaint"),
    [
        ("before_after", "", "before must be a folder that holds cuflash/ and kernels_cu/; got ''"),
        ("before_after", "--before . --masks some", "masks are full, causal and blocks<size>_<density"),
        ("before_after", "--before . --head-dims 96", "head_dims hidden"),
        ("block_sparsity", "--blocks 64,x", "argument --blocks: expected ints with commas between; got '64,x'"),
        ("chosen_speed", "--groups 5", "groups must divide 64 heads"),
        ("chosen_speed", "--regimes 1.5", "regimes are random, sink and shares"),
        ("chunked_prefill", "--cases nothing", "no nothing in cases"),
        ("cpu_score_functions", "--scores alibi", "scores must name plain"),
        ("crossover", "--blocks 48", "1024 tokens in blocks of 48: the diagonal must fit"),
        ("crossover", "--densities 0.5,0.25", "densities must lie in (0, 1] and increase; got (0.5, 0.25)"),
        ("exponential_rate", "--instructions tanh", "no tanh in instructions; there are"),
        ("flash_ladder", "--gpu-kernels naive,sm70", "no sm70 in gpu_kernels; there are naive, simt, fa1, sm80"),
        ("flashattention1_tables", "--methods fa4", "no fa4 in methods; there are standard, pytorch, fa1, dense"),
        ("flashattention1_tables", "--seqlens 100", "lengths must be multiples of 128"),
        ("memory_traffic", "--kernels simt", "no simt in kernels; there are naive, fa1, sm80, sm90"),
        ("numerical_error", "--dtypes float8", "no float8 in dtypes"),
        ("numerical_error", "--outliers 1.5", "outliers shares in"),
        ("packed", "--cases nothing", "no nothing in cases"),
        ("pattern_zoo", "--block 100", "block must divide 512; got 100"),
        ("score_functions", "--peers flash_attn_9", "no flash_attn_9 in peers"),
        ("chosen_recall", "--data x", "no x in data"),
        ("chosen_recall", "--block 12", "block must be a multiple of 8; got 12"),
        ("nsa_layer", "--kinds flash", "no flash in kinds; there are dense, nsa, moba, rows"),
        ("nsa_layer", "--stride 3", "stride must divide run and block"),
        ("selection_speed", "--seqlens 100", "must be"),
        ("selector_shootout", "--data x", "no x in"),
        ("selector_shootout", "--block 24", "must be"),
        ("speed_vs_peers", "--peers flux", "no flux in peers; there are sdpa_flash, "),
        ("speed_vs_peers", "--seqlens 1000", "seqlens must divide tokens"),
        ("speed_vs_peers", "--precision tf32x3", "precision tf32x3 is for float32; dtypes are bfloat16"),
        ("tile_sweep", "--families sm70", "no sm70 in families; there are sm90, sm80, simt"),
        ("tile_sweep", "--head-dims 96", "gpu_seqlen must divide the tokens of each family, and head_dims"),
    ],
)
def test_what_an_experiment_cannot_run_is_refused_in_one_line(
    name: str, flags: str, complaint: str, harness: ModuleType, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.chdir(ROOT)
    status, message = refused([name, *flags.split()], capsys)
    assert status == 2 and complaint in message


# Folders and files


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_folder_that_takes_no_file_is_refused_before_anything_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], harness: ModuleType
) -> None:
    (tmp_path / "file").write_text("")
    text, place = SCRIPTS[name].read_text("utf-8"), str(tmp_path / "file" / "results")
    flags = {"decode": ["--csv", f"{place}/x"], "host_time": ["--csv", f"{place}/x"]}.get(name, ["--results", place])
    flags += {"before_after": ["--before", str(ROOT)], "sweep": ["nap", "--over", "number=1"]}.get(name, [])
    writes_there = re.search(r"\bmain\(\s*Config|archive_folder\(results", text) or name == "sweep"
    if flags[0] == "--results" and not writes_there:
        pytest.skip("it writes to no folder that is named")
    monkeypatch.setattr(sys, "argv", sys.argv)
    message = refused([name, *flags], capsys)[1]
    assert "cannot write results to" in message and "name another folder" in message


# Packages and devices


# Scripts that ask for a GPU; jax_calls runs on any device of JAX.
NEED_GPU = [name for name in SCRIPTS if "why_no_gpu" in SCRIPTS[name].read_text("utf-8") and name != "jax_calls"]


@pytest.mark.usefixtures("harness")
@pytest.mark.parametrize("name", NEED_GPU)
def test_a_missing_gpu_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 0))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=SimpleNamespace))
    monkeypatch.setattr(sys, "argv", sys.argv)
    text = SCRIPTS[name].read_text("utf-8")
    flags = ["--gpu"] if "    gpu: bool" in text else []
    flags += ["--csv", str(tmp_path / "x")] if name in ("decode", "host_time") else ["--results", str(tmp_path)]
    flags += {"before_after": ["--before", str(ROOT)], "soak": ["--executors", "gpu"]}.get(name, [])
    assert "CuPy finds no GPU" in refused([name, *flags], capsys)[1]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    """The package is blocked in a separate process, as on a machine without it."""
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
sys.meta_path.insert(0, Blocked())
from experiments.__main__ import main
sys.exit(main(["pattern_zoo"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("pattern_zoo: ") and "pip install -e '.[experiments]'" in done.stderr


def test_a_fault_of_a_program_is_no_missing_package() -> None:
    assert command.complaint(ModuleNotFoundError("no harness", name="harness")) is None
    assert command.complaint(ImportError("cannot import name", name="cuflash")) is None
    assert "rich is missing" in (command.complaint(ModuleNotFoundError("no rich", name="rich")) or "")
    assert command.complaint(PermissionError(13, "Permission denied", "x")) == "[Errno 13] Permission denied: 'x'"


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("hypothesis", "testing"), ("hypothesis.strategies", "testing"), ("rich.table", "experiments"),
        ("matplotlib", "experiments"), ("cupy", "cuda13"), ("cupy.cuda", "cuda13"), ("cuda.bindings", "cuda13"),
        ("distributed", "sweeps"), ("submitit", "sweeps"), ("jax", "interop"), ("pytest", "test"),
    ],
)  # fmt: skip
def test_advice_names_the_extra_that_lists_the_module(module: str, extra: str) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    assert module.partition(".")[0] in setup["options.extras_require"][extra]
    message = command.complaint(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert message == f"the module {module} is missing: pip install -e '.[{extra}]'"


@pytest.mark.parametrize("missing", [("hypothesis",), ("rich", "matplotlib", "scipy")])
def test_help_is_told_without_optional_packages(missing: tuple[str, ...]) -> None:
    """One process, which blocks the packages, asks for the help of all experiments."""
    names = ["gpu_proof", "soak", "sim_against_gpu", "pattern_zoo", "study"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from experiments.__main__ import main
for name in {names}:
    for flag in ("-h", "--help"):
        try:
            status = main([name, flag])
        except SystemExit as ended:
            status = ended.code
        assert not status, (name, status)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--seqlen-q" in done.stdout and "--processes" in done.stdout and "--densities" in done.stdout
    is_named = "To run it: the module hypothesis is missing: pip install -e '.[testing]'" in done.stdout
    assert is_named == ("hypothesis" in missing)


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(command.runpy, "run_path", interrupted)
    assert refused(["decode"], capsys) == (1, "decode: interrupted\n")


def test_what_the_library_refuses_is_one_line(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    flags = ["--executor", "no_such", "--results", str(tmp_path)]
    monkeypatch.setattr(harness, "track", lambda items, label: iter(items))
    assert "executor must be" in refused(["block_sparsity", *flags], capsys)[1]
