"""Executes the notebooks in fresh kernels and keeps the parts of their outputs that are the same in every run.

As a script it rewrites them: ``python -m tests.notebooks.executed [NAME...]``.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from nbclient import NotebookClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
_KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_BARS = "ignore:IProgress not found"
"""Hides tqdm's warning that widgets for progress bars are not installed."""
_TIMEOUT_S = 170
_COLOURS = 128


def executed(path: Path) -> NotebookNode:
    """Return the notebook, run in a kernel of its own: offline, without user settings, with this checkout's code."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        nobodys = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"), folder)
        said = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": _BARS, **nobodys}
        client = NotebookClient(
            notebook, timeout=_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
        )
        client.execute(env=os.environ | said)
    return normalised(notebook)


def normalised(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook without times, ids and versions, and with pictures of few colours."""
    notebook.metadata = nbformat.from_dict(_KERNEL)
    notebook.nbformat_minor = 5
    ran = 0
    for at, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{at}", nbformat.from_dict({})
        if cell.cell_type == "code":
            ran += 1
            cell.execution_count = ran
            cell.outputs = [_normalised(output, ran) for output in _joined(cell.outputs)]
    return notebook


def _joined(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Join adjacent pieces of a stream, which the kernel splits whenever it empties its buffer."""
    last = None
    for output in outputs:
        if (
            output.output_type == "stream"
            and last is not None
            and (last.output_type, last.get("name")) == ("stream", output.name)
        ):
            last.text += output.text
        else:
            yield (last := output)


def _normalised(output: NotebookNode, ran: int) -> NotebookNode:
    if "execution_count" in output:
        output.execution_count = ran
    data = output.get("data", {})
    if len(data) > 1:
        data.pop("text/plain", None)  # the name of a class, and perhaps an address
    if "image/png" in data:
        data["image/png"] = _small(data["image/png"])
    return output


def _small(png: str) -> str:
    from PIL import Image

    held = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as opened:
        picture = opened.convert("RGB")
    picture.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(held, "png", optimize=True)
    return base64.b64encode(held.getvalue()).decode()


def written(notebook: NotebookNode) -> str:
    """Return the text of the notebook's file."""
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook, indent=1, sort_keys=True)
    return text + "\n"


def shown(notebook: NotebookNode) -> list[list[str]]:
    """Return the outputs of every code cell, with only the names of pictures."""
    return [[_shown(output) for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]


def _shown(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return f"{output.name}: {output.text}"
    if output.output_type == "error":
        return f"error: {output.ename}: {output.evalue}"
    named = {kind: "a picture" if kind == "image/png" else text for kind, text in output.data.items()}
    return json.dumps(named, ensure_ascii=False, sort_keys=True)


def pictures(notebook: NotebookNode) -> list[bytes]:
    """Return the pictures in order."""
    outputs = (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    return [base64.b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})]


def refresh(names: list[str]) -> None:
    """Execute the named notebooks, or all, and write them."""
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            path.write_text(written(executed(path)), encoding="utf-8")


if __name__ == "__main__":
    refresh(sys.argv[1:])
