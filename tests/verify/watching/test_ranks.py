"""Every rank of a fake group shows the same as real ranks, under every engine: peaks, held bytes, kinds and collectives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("library", ["torch", pytest.param("deepspeed", marks=pytest.mark.deepspeed)])
def test_the_fake_group_shows_every_rank_what_real_ranks_show(library: str, tmp_path: Path):
    """One test for all engines of a library, so that each group of ranks is started once."""
    from tests.verify.watching.ranks import CASES, RANKS, can_be

    pytest.importorskip(library)
    said = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.verify.watching.ranks", str(tmp_path), library],
        cwd=ROOT, env=os.environ | said, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for ranks in RANKS[library]:
        real, fake = ([read(tmp_path, transport, ranks, rank) for rank in range(ranks)] for transport in ("gloo", "fake"))
        for name in CASES[library]:
            for rank in range(ranks):
                shown = rank if can_be(name, rank) else 0  # rank 0's share of DeepSpeed's stage 3 is that of every rank
                assert real[rank][name] == fake[shown][name], (name, ranks, rank)
        first = next(iter(CASES[library]))
        assert library == "deepspeed" or real[0][first] != real[-1][first]  # the last rank has less


def read(folder: Path, transport: str, ranks: int, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / f"{transport}-{ranks}-{rank}.json").read_text(encoding="utf-8"))
    return found
