"""What the README and the pages of docs/ claim: commands, output, Python. Run as a script to write the output anew."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from zeroplan.cli.app import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FIRST_OUTPUT = re.compile(r"(<!-- first output -->\n```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
_FIRST_COMMAND = re.compile(r"<!-- first command -->\n```sh\n.*&& \.venv/bin/zeroplan (.*?)\n```", re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [text for kind, text in _FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(page: Path) -> list[str]:
    """The zeroplan commands of a page's shell blocks, without comments."""
    lines = [line.partition("#")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("zeroplan ")]


def printed(arguments: list[str]) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(arguments)
    return out.getvalue()


def first_arguments() -> list[str]:
    """The arguments of the README's first command."""
    found = _FIRST_COMMAND.search(README.read_text(encoding="utf-8"))
    assert found is not None, "README.md has lost its first command"
    return found[1].split()


def shown_output() -> str:
    """What the README says the first command prints."""
    found = _FIRST_OUTPUT.search(README.read_text(encoding="utf-8"))
    assert found is not None, "README.md has lost its first output"
    return found[2]


def refresh() -> None:
    """Write the first command's output into the README."""
    text = README.read_text(encoding="utf-8")
    output = printed(first_arguments())
    README.write_text(_FIRST_OUTPUT.sub(lambda found: found[1] + output + found[3], text), encoding="utf-8")


if __name__ == "__main__":
    refresh()
