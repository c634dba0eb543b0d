"""zeroplan reads the job file that the page on the command line shows."""

from pathlib import Path

from tests.docs.pages import ROOT, blocks
from zeroplan.job_file import read_job_file
from zeroplan.resolve import resolve


def test_the_job_file_that_is_shown_is_read(tmp_path: Path):
    (shown,) = blocks(ROOT / "docs" / "cli.md", "toml")
    (tmp_path / "job.toml").write_text(shown)
    job = resolve(read_job_file(tmp_path / "job.toml")).job
    assert (job.mesh.world_size, job.batch.seq_len, job.recipe.recompute) == (8, 8192, "full")
