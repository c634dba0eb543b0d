"""The page on compiling and evaluating shows the figures of dry runs of its script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dryrun.running import SCRIPTS, dry_run

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "compile-and-evaluate.md"
_GIB = 2**30


@pytest.mark.parametrize(
    ("compiled", "row"),
    [
        ((), "nothing"),
        (("blocks",), "each block: `layer.compile()`"),
        (("loss",), "the loss: `torch.compile(loss_of)`"),
        (("blocks", "loss"), "both"),
    ],
)
def test_the_page_has_the_peak_of_each_compiled_part(compiled: tuple[str, ...], row: str, tmp_path: Path):
    run = dry_run("--gpus", "8", "--", str(SCRIPTS / "compiled_blocks.py"), *compiled, folder=tmp_path)
    assert f"| {row} | {run.peak_bytes / _GIB:.2f} |" in PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_peak_of_the_evaluation(tmp_path: Path):
    answer = dry_run("--gpus", "8", "--", str(SCRIPTS / "compiled_blocks.py"), "evaluate", folder=tmp_path).answer
    (evaluation,) = (one for one in answer["phases"] if one["phase"] == "evaluation")
    assert f"the evaluation peaks at {evaluation['peak_bytes'] / _GIB:.2f} GiB" in " ".join(
        PAGE.read_text(encoding="utf-8").split()
    )
