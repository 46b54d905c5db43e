"""The intended files are installed: wheel, source archive and both editable modes, built and imported offline.

The long profile also runs slow checks: types after an editable install, the time of an import, a second build.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from executors import is_long

ROOT = Path(__file__).parents[2]
pytest.importorskip("setuptools", "77", reason="building needs setuptools 77: pip install '.[test]'")
pytest.importorskip("setuptools_scm", reason="building needs setuptools-scm: pip install '.[test]'")
pytestmark = pytest.mark.slow
in_the_long_profile = pytest.mark.skipif(not is_long(), reason="part of the long profile: CUFLASH_PROFILE=long")

NOT_SOURCES = (".*", "build", "_build", "generated", "gallery", "*.egg-info", "__pycache__")
USE = """import numpy as np, cuflash
from cuflash.compiler.source import KERNELS
q = np.ones((3, 2))
assert (KERNELS / "simt" / "forward.cu").is_file()
print(cuflash.attention(q, q, q).sum(), cuflash.__file__)
"""


def _build(source: Path, hook: str, out: Path, settings: object = None) -> Path:
    """Build a copy of the project with its backend, as pip and build do, without network access."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta as b; print('made', b.{hook}({str(out)!r}, {settings!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return out / re.findall(r"^made (.+)$", run.stdout, re.MULTILINE)[-1]


def _use(site: Path) -> str:
    """Run cuflash from a folder of installed packages, without any other copy; return the imported module's path."""
    # -S: no site-packages, whose .pth files may name the checkout; NumPy's and SciPy's folder comes last, without .pth
    # files.
    packages = str(Path(np.__file__).parents[1])
    code = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({packages!r})\n{USE}"
    command = [sys.executable, "-I", "-S", "-c", code]
    run = subprocess.run(command, cwd=site, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    total, place = run.stdout.split(maxsplit=1)
    assert total == "6.0"
    return place.strip()


def _unpacked(wheel: Path, where: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where)
    return where


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("project") / "cuflash"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    shutil.rmtree(copy / "experiments" / "results")
    return copy


@pytest.fixture(scope="module")
def wheel(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(project, "build_wheel", tmp_path_factory.mktemp("wheel"))


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    sources = [path for path in (ROOT / "cuflash").rglob("*") if path.suffix in (".py", ".cuh", ".hpp", ".cpp")]
    kernels = [path for path in (ROOT / "kernels_cu").rglob("*") if path.suffix in (".cu", ".cuh")]
    library = {str(path.relative_to(ROOT)) for path in sources} | {"cuflash/py.typed"}
    library |= {f"cuflash/{path.relative_to(ROOT)}" for path in kernels}
    assert {name for name in _names(wheel) if ".dist-info/" not in name} == library
    assert any(name.endswith("licenses/LICENSE") for name in _names(wheel))


def test_the_wheel_works(wheel: Path, tmp_path: Path) -> None:
    assert Path(_use(_unpacked(wheel, tmp_path))).is_relative_to(tmp_path)


def test_the_metadata_is_complete(wheel: Path, tmp_path: Path) -> None:
    text = next(_unpacked(wheel, tmp_path).glob("*.dist-info/METADATA")).read_text("utf-8")
    extras = ("Provides-Extra: cuda13", "Provides-Extra: testing")
    for line in ("Name: cuflash", "License-Expression: BSD-3-Clause", "Requires-Python: >=3.11", *extras):
        assert f"{line}\n" in text
    assert re.search("^Project-URL: Documentation, https://.+", text, re.MULTILINE)
    assert re.search("^Keywords: .*attention", text, re.MULTILINE)


def test_the_index_shows_the_whole_readme_without_dead_links(wheel: Path, tmp_path: Path) -> None:
    metadata = email.message_from_bytes(next(_unpacked(wheel, tmp_path).glob("*.dist-info/METADATA")).read_bytes())
    shown, readme = metadata.get_payload(), (ROOT / "README.md").read_text("utf-8")
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert {"docs/images/masks.png", "docs/install.md"} <= set(links)
    assert [link for link in re.findall(r"\]\(([^)]*)\)", shown) if not link.startswith("https://")] == []
    # The shown text keeps every word, and every path except those of images.
    images = dict(re.findall(r"!\[([^]]*)\]\(([^)]*)\)", readme))
    words = re.findall(r"\w+", re.sub(r"!\[[^]]*\]\([^)]*\)", "", readme))
    assert set(words) <= set(re.findall(r"\w+", shown)) and len(images) == 2
    assert all(f"`{link}`" in shown for link in links if link not in images.values() and "://" not in link)


def test_the_source_archive_builds_the_same_wheel_and_runs_its_tests(
    project: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(_build(project, "build_sdist", tmp_path)) as archive:
        # Python before 3.11.4 has no extraction filters; later versions require one.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = tmp_path.glob("cuflash-*/")
    assert _names(_build(source, "build_wheel", tmp_path / "wheel")) == _names(wheel)
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert {name for name in files if not (source / name).exists()} == set()
    assert re.search(r"^\d+ passed", _run_tests(source, "tests/kernels/test_tensor_map.py"), re.MULTILINE)


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_an_editable_install_works(project: Path, tmp_path: Path, mode: str) -> None:
    wheel = _build(project, "build_editable", tmp_path / "wheel", {"editable_mode": mode})
    assert Path(_use(_unpacked(wheel, tmp_path / "site"))).is_relative_to(project)


def test_a_type_checker_follows_an_editable_install(project: Path, tmp_path: Path) -> None:
    """It follows a .pth file that names a folder, but not one that imports a finder."""
    site = _unpacked(_build(project, "build_editable", tmp_path / "wheel"), tmp_path / "site")
    (pth,) = site.glob("*.pth")
    assert Path(pth.read_text("utf-8").strip()) == project and (project / "cuflash" / "py.typed").is_file()


WRONG_CALL = """import cuflash
import numpy as np

x = np.ones((3, 2))
reveal_type(cuflash.plan(x, x, x))
cuflash.attention(x, x, x, causal="bottomright")
"""


@in_the_long_profile
@pytest.mark.parametrize("hook", ["build_editable", "build_wheel"])
def test_mypy_sees_the_types_of_what_is_installed(project: Path, tmp_path: Path, hook: str) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    (site,) = environment.glob("lib/python*/site-packages")
    _unpacked(_build(project, hook, tmp_path / "wheel"), site)
    (site / "others.pth").write_text(str(Path(np.__file__).parents[1]))
    (tmp_path / "client.py").write_text(WRONG_CALL)
    interpreter = str(environment / "bin" / "python")
    command = ["-m", "mypy", "--strict", "--python-executable", interpreter, "--cache-dir", "cache", "client.py"]
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    run = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
    )
    assert 'client.py:5: note: Revealed type is "cuflash.plans.plan.Plan"' in run.stdout, run.stdout + run.stderr
    assert re.search(r"client\.py:6: error: .*\[call-overload\]", run.stdout), run.stdout


@in_the_long_profile
def test_a_second_build_holds_no_file_of_the_first(project: Path, tmp_path: Path) -> None:
    clone = shutil.copytree(project, tmp_path / "clone")
    (clone / "cuflash" / "removed.py").touch()
    assert "cuflash/removed.py" in _names(_build(clone, "build_wheel", tmp_path / "first"))
    (clone / "cuflash" / "removed.py").unlink()
    assert "cuflash/removed.py" not in _names(_build(clone, "build_wheel", tmp_path / "second"))


@in_the_long_profile
@pytest.mark.parametrize("statement", ["import cuflash", "import cuflash; cuflash.attention; cuflash.masks"])
def test_an_import_takes_little_time_beside_that_of_numpy(wheel: Path, tmp_path: Path, statement: str) -> None:
    site = _unpacked(wheel, tmp_path)
    imported = f"sys.path[:0] = [{str(site)!r}, {str(Path(np.__file__).parents[1])!r}]; import numpy"
    timed = f"start = time.process_time(); {statement}; print(time.process_time() - start)"
    command = [sys.executable, "-I", "-S", "-c", f"import sys, time; {imported}; {timed}"]
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=120, check=True) for _ in range(6)]
    assert min(float(run.stdout) for run in runs) <= 0.35  # the first run also writes bytecode


@in_the_long_profile
def test_threads_may_use_their_first_names_at_the_same_time(wheel: Path, tmp_path: Path) -> None:
    site = _unpacked(wheel, tmp_path)
    code = f"""import sys, threading
sys.path[:0] = [{str(site)!r}, {str(Path(np.__file__).parents[1])!r}]
import cuflash
names = [name for name in cuflash.__all__ for _ in range(3)]
start, missing = threading.Barrier(len(names)), list(names)
def use(name):
    start.wait()
    getattr(cuflash, name)
    missing.remove(name)
threads = [threading.Thread(target=use, args=(name,)) for name in names]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(missing)"""
    for _ in range(5):
        run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=120)
        assert run.stdout == "[]\n", run.stderr


def _run_in(folder: Path, *arguments: str) -> str:
    """Return Python's output in a folder, with the packages of this environment and no path to this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _run_tests(folder: Path, path: str) -> str:
    return _run_in(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", path)


@pytest.fixture
def clone(project: Path, tmp_path: Path) -> Path:
    shutil.copytree(project, tmp_path / "cuflash")
    return tmp_path / "cuflash"


def test_the_folder_that_holds_a_clone_hides_no_installed_package(clone: Path, wheel: Path, tmp_path: Path) -> None:
    site = _unpacked(wheel, tmp_path / "site")
    path = [str(site), str(Path(np.__file__).parents[1])]
    code = f"import sys; sys.path += {path}; import cuflash; print(cuflash.__file__)"
    place = _run_in(clone.parent, "-S", "-c", code)
    assert place.strip() == str(site / "cuflash" / "__init__.py")


@pytest.mark.parametrize(("name", "is_inside"), [("cuflash", False), ("cuflash-0.1.0", True)])
def test_pytest_collects_a_clone_of_any_name(clone: Path, name: str, is_inside: bool) -> None:
    clone = clone.rename(clone.with_name(name))
    folder, path = (clone, "tests") if is_inside else (clone.parent, f"{name}/tests")
    output = _run_tests(folder, f"{path}/kernels/test_tensor_map.py")
    assert re.search(r"^\d+ passed", output, re.MULTILINE)


def test_the_version_is_the_tag_and_without_one_the_fallback(
    project: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wheel.name.split("-")[1] == "0.1.dev0"
    clone = shutil.copytree(project, tmp_path / "clone")
    shutil.copy(ROOT / ".gitignore", clone)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "all"), ("tag", "v7.8.9")):
        subprocess.run(["git", *command], cwd=clone, check=True, timeout=120)
    tagged = _build(clone, "build_wheel", tmp_path / "tagged")
    assert tagged.name.split("-")[1] == "7.8.9"
    run = "import cuflash, sys; sys.stdout.write(cuflash.__version__)"
    site = _unpacked(tagged, tmp_path / "site")
    assert _run_in(tmp_path, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {run}") == "7.8.9"
    archive = _build(clone, "build_sdist", tmp_path)
    assert archive.name == "cuflash-7.8.9.tar.gz"
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    built = _build(tmp_path / "cuflash-7.8.9", "build_wheel", tmp_path / "of_archive")
    assert built.name.split("-")[1] == "7.8.9"


def _release() -> ModuleType:
    spec = spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_is_refused_whose_versions_disagree() -> None:
    release = _release()
    citation, changes = (ROOT / "CITATION.cff").read_text("utf-8"), (ROOT / "CHANGELOG.md").read_text("utf-8")
    version, notes = release.newest_changes(changes)
    assert release.mismatches(None, citation, changes) == release.mismatches(version, citation, changes) == []
    assert release.mismatches("9.9.9", citation, changes) == [
        f"the tag is v9.9.9, and CHANGELOG.md's newest section {version}"
    ]
    assert len(release.mismatches(version, citation.replace(version, "9.9.9"), changes)) == 1
    assert 0 < notes.count("\n") <= 60 and "## [" not in notes


def test_the_public_workflow_runs_what_a_change_must_pass() -> None:
    assert "run: .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
