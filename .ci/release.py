"""Build the release of the tag at HEAD into dist/, check it, and write its notes. Nothing is uploaded.

    make release

1. The tag, `vX.Y.Z`, CITATION.cff and the newest section of CHANGELOG.md name the same version. Without a tag this is
   a rehearsal: everything is built and checked under a development version.
2. `build` makes the source archive, and the wheel from it; `twine check --strict` reads their metadata.
3. The wheel is installed into a fresh environment. The README's Python block and `python -m cuflash` run there in an
   empty folder, and so does a test from the source archive.
4. dist/RELEASE_NOTES.md has the section of CHANGELOG.md.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
QUICK_TEST = "tests/kernels/test_tensor_map.py"


def tagged() -> str | None:
    """Return the version of the tag at HEAD; None without a tag."""
    command = ["git", "describe", "--exact-match", "--tags", "--match", "v[0-9]*"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip().removeprefix("v") if run.returncode == 0 else None


def newest_changes(changelog: str) -> tuple[str, str]:
    """Return version and text of the newest section of the changelog."""
    heading, text = re.search(r"^## \[([^\]]+)\][^\n]*\n(.*?)(?=^## |\Z)", changelog, re.M | re.S).groups()
    return heading, text.strip()


def mismatches(tag: str | None, citation: str, changelog: str) -> list[str]:
    """List what disagrees about the version that is released."""
    changed = newest_changes(changelog)[0]
    cited = re.search(r"^version: (.+)$", citation, re.M)[1]
    wrong = [] if cited == changed else [f"CITATION.cff has version {cited}, and CHANGELOG.md {changed}"]
    if tag not in (None, changed):
        wrong.append(f"the tag is v{tag}, and CHANGELOG.md's newest section {changed}")
    return wrong


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Print a command and run it; end the program if it fails."""
    print("$", " ".join(map(str, command)), flush=True)
    if subprocess.run(list(map(str, command)), cwd=cwd).returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}")


def check_in_fresh_environment(wheel: Path, archive: Path) -> None:
    """Install the wheel and run the README's commands, then a test from the source archive."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)[1]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "venv", with_pip=True)
        python = home / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[testing]", "pytest>=9")
        (home / "empty").mkdir()
        run(python, "-c", block, cwd=home / "empty")
        run(python, "-m", "cuflash", cwd=home / "empty")
        with tarfile.open(archive) as packed:
            packed.extractall(home, filter="data")
        source = home / archive.name.removesuffix(".tar.gz")
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", QUICK_TEST, cwd=source)


def main() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    tag = tagged()
    if wrong := mismatches(tag, (ROOT / "CITATION.cff").read_text("utf-8"), changelog):
        sys.exit("\n".join(wrong))
    for old in DIST.glob("*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    if tag and wheel.name.split("-")[1] != tag:
        sys.exit(f"the tag is v{tag}, and the wheel {wheel.name}: commit what has changed")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, archive)
    check_in_fresh_environment(wheel, archive)
    (DIST / "RELEASE_NOTES.md").write_text(newest_changes(changelog)[1] + "\n", "utf-8")
    state = "rehearsed" if tag is None else f"v{tag} is ready"
    print(f"{state}: {wheel.name}, {archive.name} and RELEASE_NOTES.md are in dist/")


if __name__ == "__main__":
    main()
