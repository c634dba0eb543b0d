"""Draws the pictures of the pages with the pages' own commands. Run as a script, it redraws all of them."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tests.docs.pages import PAGES, ROOT, commands, furnish, printed, text_of
from tests.measured import stored
from zeroplan.verify.record import write_record

if TYPE_CHECKING:
    from zeroplan.measurement import Measurement

SAVED_RUN = Path(__file__).with_name("run.gz")
"""`zeroplan dryrun --gpus 8 --save run.gz -- train.py 4 512 512`; the script is ``tests/dryrun/scripts/fsdp2.py``."""
EVALUATION = Path(__file__).with_name("evaluates.gz")
"""`zeroplan dryrun --gpus 8 --gpu h100 --until-end --save evaluates.gz -- train.py`: ``tests/dryrun/scripts/evaluates.py``."""
FIGURES = ROOT / "docs" / "figures"
_SHOWN = re.compile(r"\]\((?:\.\./)*(?:docs/)?figures/([\w-]+\.png)[#)]")
THEMES = ("light", "dark")


@cache
def _records() -> tuple[Measurement, ...]:
    return tuple(stored.records(stored.PEERS))


def place_records(folder: Path) -> None:
    """Write the records and the saved runs that the pages' commands name into a folder."""
    for saved in (SAVED_RUN, EVALUATION):
        shutil.copy(saved, folder)
    for record in _records():
        write_record(record, folder / "records")


def drawn_by(command: str) -> str | None:
    """Return the file that a command draws, or None."""
    words = shlex.split(command)
    return words[words.index("-o") + 1] if "-o" in words else None


def refresh() -> None:
    """Draw every picture of the pages in both themes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        furnish(Path(folder))
        for command in pictured():
            for theme in THEMES:
                name = draw(command, theme)
                if _is_shown(name):
                    _make_small(Path(name), FIGURES / name)


def pictured() -> list[str]:
    """Return the commands whose pictures the pages show, each once."""
    drawing = {command: name for page in PAGES for command in commands(page) if (name := drawn_by(command)) is not None}
    return [command for command, name in drawing.items() if _is_shown(name)]


def _is_shown(name: str) -> bool:
    return any(name in _SHOWN.findall(text_of(page)) for page in PAGES)


def draw(command: str, theme: str) -> str:
    """Draw the picture of a command in the current folder and return its file name, which differs for the dark theme."""
    with mock.patch("zeroplan.report.plots.frame.stamped"):  # which has the date
        return _draw(command, theme)


def _draw(command: str, theme: str) -> str:
    name = str(drawn_by(command))
    words = shlex.split(command)[1:]
    if theme == "light":
        printed(words)
        return name
    dark = name.replace(".png", "-dark.png")
    printed([dark if word == name else word for word in words] + ["--theme", "dark"])
    return dark


def _make_small(drawn: Path, kept: Path) -> None:
    """Save the picture with 160 colours, which are enough for bands and letters."""
    from PIL import Image

    with Image.open(drawn) as opened:
        picture = opened.convert("RGB")
    picture.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(kept, optimize=True)


_COLOURS = 160


def assert_as_kept(drawn: Path) -> None:
    """Check that the picture in docs/figures is what the command draws."""
    from matplotlib.testing.compare import compare_images

    _make_small(drawn, drawn)
    difference = compare_images(str(FIGURES / drawn.name), str(drawn), tol=_EDGES)
    assert difference is None, f"{difference}; `python -m tests.docs.pictures` draws it anew"


_EDGES = 0.5
"""Tolerance, as a root mean square over colours from 0 to 255: edges of letters may differ, a digit of a label may not."""


if __name__ == "__main__":
    refresh()
