"""The table and the drawing of the package's layers, from the import contract and the modules' docstrings."""

from __future__ import annotations

import ast
import tomllib
from itertools import pairwise
from pathlib import Path

from tests.docs.generated.markdown import code, one_line, table

_ROOT = Path(__file__).parents[3]
FIGURE = _ROOT / "docs" / "figures" / "layers.svg"
_WIDTH, _ROW, _BOX, _MARGIN, _GAP = 760, 44, 32, 10, 8
_TEXT = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="14" text-anchor="middle" fill="#1b1f24"'


def table_of_layers() -> str:
    """Return the table of layers, with the first sentence of each module's docstring."""
    rows = [("" if at else "↓", code(name), _first_sentence(name)) for layer in _layers() for at, name in enumerate(layer)]
    return table(("", "module", "what it answers"), rows)


def _layers() -> list[list[str]]:
    said = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = said["tool"]["importlinter"]["contracts"][0]["layers"]
    return [[name.strip(" ()") for name in layer.split("|")] for layer in layers]


def _first_sentence(module: str) -> str:
    file = _ROOT / "zeroplan" / f"{module}.py"
    file = file if file.exists() else file.with_suffix("") / "__init__.py"
    said = one_line(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))))
    ends = [at for at, (sign, after) in enumerate(pairwise(said + " ")) if sign in ".?" and after == " "]
    return said[: ends[0] + 1] if ends else said


def drawing() -> str:
    """Return the layers as an SVG of boxes; modules of one layer are side by side."""
    rows = _layers()
    height = _ROW * len(rows) + 2 * _MARGIN
    boxes = "\n".join(_row(at, names) for at, names in enumerate(rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">\n'
        "<title>The layers of zeroplan, from the command line at the top to numbers and errors at the bottom</title>\n"
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n{boxes}\n</svg>\n'
    )


def _row(at: int, names: list[str]) -> str:
    width = (_WIDTH - 2 * _MARGIN - (len(names) - 1) * _GAP) / len(names)
    return "\n".join(_box(_MARGIN + one * (width + _GAP), _MARGIN + at * _ROW, width, name) for one, name in enumerate(names))


def _box(x: float, y: float, width: float, name: str) -> str:
    fill, note = ("#fbd9b9", "") if name != "verify" else ("#f5a623", " (torch)")
    fill = "#d6e4f0" if name not in ("cli", "verify", "explore", "report", "export", "snapshots") else fill
    return (
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{_BOX}" rx="5" fill="{fill}" stroke="#5b6b7a"/>'
        f'<text x="{x + width / 2:.0f}" y="{y + 21}" {_TEXT}>{name}{note}</text>'
    )
