"""Build the README that PyPI shows, and build in a folder without files of an earlier build."""

import re
import tempfile
from pathlib import Path

from setuptools import setup


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
        long_description=long_description(),
        long_description_content_type="text/markdown",
        options={"build": {"build_base": folder}},
    )
