"""Tell setuptools what setup.cfg cannot express.

- The CUDA sources in kernels_cu, at the top of the repository, are installed as cuflash/kernels_cu.
- PyPI shows the README without links that would lead nowhere there.
- Each build starts in an empty folder, without files of an earlier build.
"""

import re
import sys
import tempfile
from pathlib import Path

from setuptools import find_namespace_packages, setup

# `pip install --editable .` names the repository in a .pth file, which type checkers follow, if no package is mapped to
# another folder. cuflash then reads the kernels from the repository. The strict mode links installed files one by one.
uses_repository = "editable_wheel" in sys.argv and "strict" not in sys.argv
package_dir = {"": "."} if uses_repository else {"": ".", "cuflash.kernels_cu": "kernels_cu"}
packages = find_namespace_packages(include=["cuflash", "cuflash.*"], exclude=["*__pycache__*"])
if not uses_repository:
    # Folders of CUDA sources have no __init__.py.
    kernels = find_namespace_packages(include=["kernels_cu", "kernels_cu.*"], exclude=["*__pycache__*"])
    packages += [f"cuflash.{name}" for name in kernels]


def long_description() -> str:
    """Return the README without relative images, and with the path of each relative link instead of the link.

    Either would lead nowhere on PyPI.
    """
    text = Path(__file__).with_name("README.md").read_text("utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)]*)\)", _without_link, text)


def _without_link(link: re.Match) -> str:
    text, path = link.groups()
    return f"`{path}`" if text == path else f"{text} (`{path}`)"


# In build/, a module that has been removed since the last build would be packed again.
with tempfile.TemporaryDirectory() as folder:
    setup(
        packages=packages,
        package_dir=package_dir,
        long_description=long_description(),
        long_description_content_type="text/markdown",
        options={"build": {"build_base": folder}},
    )
