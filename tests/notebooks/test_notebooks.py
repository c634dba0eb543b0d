"""Every notebook runs from top to bottom, and gives the outputs that its file has."""

import re
from pathlib import Path

import pytest

for needed in ("nbclient", "nbformat", "ipykernel", "PIL"):
    pytest.importorskip(needed, reason=f"{needed} is of the extra `notebooks`")

import nbformat  # noqa: E402

from tests.notebooks.executed import FOLDER, NOTEBOOKS, executed, pictures, shown, written  # noqa: E402

_TORCH = "zero-from-scratch"
_EDGES = 0.5
"""Root mean square over colours from 0 to 255. Edges of letters may differ, a digit of a label may not."""
_LARGEST = 300_000
ANEW = "`python -m tests.notebooks.executed` writes it anew"


def named(path: Path) -> object:
    return pytest.param(path, id=path.stem, marks=[pytest.mark.torch] if path.stem == _TORCH else [])


@pytest.mark.parametrize("path", [named(path) for path in NOTEBOOKS])
def test_a_notebook_has_the_outputs_of_its_run(path: Path, tmp_path: Path):
    if path.stem == _TORCH:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    kept, now = nbformat.read(path, as_version=4), executed(path)
    assert shown(kept) == shown(now), f"{path.name} is stale; {ANEW}"
    compare(pictures(kept), pictures(now), tmp_path)


def compare(kept: list[bytes], now: list[bytes], folder: Path) -> None:
    from matplotlib.testing.compare import compare_images

    assert len(kept) == len(now)
    for at, pair in enumerate(zip(kept, now, strict=True)):
        files = [folder / f"{name}-{at}.png" for name in ("kept", "now")]
        for file, png in zip(files, pair, strict=True):
            file.write_bytes(png)
        difference = compare_images(*map(str, files), tol=_EDGES)
        assert difference is None, f"{difference}; {ANEW}"


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_a_notebook_is_small_quiet_and_as_the_script_writes_it(path: Path):
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    assert len(text) < _LARGEST
    assert text == written(notebook)
    links = [link for cell in notebook.cells for link in re.findall(r"\]\((\.\./[^)#]+)\)", cell.source)]
    assert all((FOLDER / link).exists() for link in links), links
    assert not [said for cell in shown(notebook) for said in cell if said.startswith(("stderr:", "error:"))]


def test_the_page_has_a_paragraph_for_every_notebook():
    page = (FOLDER.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"`notebooks/([\w-]+)\.ipynb`", page)) == [path.stem for path in NOTEBOOKS]
