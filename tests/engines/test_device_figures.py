"""Figures that only hardware can give: the checks of their file, and how they enter an estimate."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zeroplan import estimate, job
from zeroplan.catalog.gpu import gpu, gpu_names
from zeroplan.engines import device, device_figures
from zeroplan.engines.device import outside, reserved_as_seen, workspace_line
from zeroplan.engines.device_figures import DeviceFigure, figures
from zeroplan.errors import SpecError
from zeroplan.ledger import Band
from zeroplan.planner.search import outside_column
from zeroplan.planner.space import Grid
from zeroplan.spec.mesh import MeshSpec

H100, T4 = gpu("h100"), gpu("t4")
GENERAL = outside(MeshSpec(dp_shard=8))


def test_every_figure_has_a_source_a_date_and_gpus_of_the_catalogue():
    assert figures()
    for figure in figures():
        assert len(figure.source) > 10
        assert 2019 <= int(figure.as_of[:4]) <= 2026
        assert set(figure.gpus) <= set(gpu_names())


GOOD = 'what = "context"\ngpus = ["t4-16gb"]\nvalue = 5\ntorch = ""\ncuda = ""\nas_of = "2025"\nsource = "seen"\n'


@pytest.mark.parametrize(("text", "said"), [
    ("[[figure]]\n" + GOOD + "size = 3", "figure 1: no such key 'size'"),
    ("[[figure]]\n" + GOOD + "[[figure]]\n" + GOOD.replace('as_of = "2025"\n', ""), "figure 2: 'as_of' is missing"),
    ("[[figure]]\n" + GOOD.replace("context", "contexts"), "what is one of context, process"),
    ("[[figure]]\n" + GOOD.replace("= 5", "= -5"), "value a positive whole number"),
    ("[[figure]]\n" + GOOD.replace("seen", ""), "has no source or no date"),
    ("figure = 3", "figure is no list of tables"),
    ("[[figure", "is not TOML"),
])  # fmt: skip
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str):
    path = tmp_path / "figures.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        figures(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_gpu_without_reported_figures_has_the_general_ranges():
    assert outside(MeshSpec(dp_shard=8), T4) == GENERAL


def test_a_measured_context_is_the_lower_end_of_the_band_and_leaves_room_for_kernels():
    context, communicator = outside(MeshSpec(dp_shard=8), gpu("rtx-6000-ada"))
    assert context.band == Band(446_693_376, 540_000_000, 900_000_000)
    assert "unsloth-zoo pull request 1053" in context.source
    assert communicator == GENERAL[1]
    assert estimate(job(model="gpt2", gpus=8, gpu="rtx-6000-ada")).outside == (context, communicator)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch):
    """Yield a function that replaces the figures of the file. It clears the caches, and so does the end of the test."""

    def clear() -> None:
        for cached in (*vars(device_figures).values(), *vars(device).values()):
            getattr(cached, "cache_clear", lambda: None)()

    def put(*tables: DeviceFigure) -> None:
        monkeypatch.setattr(device_figures, "figures", lambda: tables)
        clear()

    yield put
    monkeypatch.undo()
    clear()


def figure(what: str, value: int, **said: str) -> DeviceFigure:
    given = {"torch": "2.11.0", "cuda": "13.0", "as_of": "2026-11", "source": "a record", **said}
    return DeviceFigure(what=what, gpus=("t4-16gb",), value=value, **given)  # type: ignore[arg-type]


def test_figures_of_a_gpu_make_its_band(seen):
    seen(*(figure("process", value) for value in (900, 700, 800)), figure("communicator", 50))
    process, communicator = outside(MeshSpec(dp_shard=2, dp_replicate=2), T4)
    assert process.band == Band(700, 800, 900)
    assert (communicator.what, communicator.band) == ("2 NCCL communicators", Band(100, 100, 100))
    assert process.source.startswith("a record (torch 2.11.0, CUDA 13.0, 2026-11); ")
    assert outside(MeshSpec(dp_shard=8)) == outside(MeshSpec(dp_shard=8), H100) == GENERAL


def test_figures_of_the_newest_torch_are_used(seen):
    seen(figure("process", 700, torch="2.9.1"), figure("process", 900, torch="2.11.0+cu130"), figure("process", 100, torch=""))
    assert outside(MeshSpec(), T4)[0].band == Band(900, 900, 900)


def test_a_measured_workspace_replaces_that_of_torchs_source(seen):
    seen(figure("workspace", 1000))
    assert workspace_line(T4).n_bytes == 2000
    assert workspace_line(T4).source == "a record (torch 2.11.0, CUDA 13.0, 2026-11)"
    assert workspace_line(H100).n_bytes == 2 * 32 * 2**20


def test_measured_reserved_memory_moves_the_expected_figure_for_its_engine(seen):
    seen(figure("reserved", 1100, engine="ddp"))
    assert reserved_as_seen(Band(10, 1000, 3000), "ddp", T4) == Band(10, 1100, 3000)
    assert reserved_as_seen(Band(10, 1000, 1050), "ddp", T4) == Band(10, 1100, 1100), "the middle lies in the band"
    assert reserved_as_seen(Band(10, 1000, 3000), "fsdp2", T4) == Band(10, 1000, 3000)
    seen(figure("reserved", 500, engine="ddp"))
    assert reserved_as_seen(Band(900, 1000, 3000), "ddp", T4) == Band(900, 900, 3000)


def test_estimate_and_search_use_the_same_figure(seen):
    before = estimate(job(model="gpt2", gpus=8, stage=0, gpu="t4"))
    expected = before.reserved.expected_bytes
    seen(figure("process", 10**9), figure("reserved", 1100, engine="ddp"))
    after = estimate(replace(before.job))
    ranks, once = np.array([8]), np.array([1])
    grid = Grid(once, ranks, once, 1024, once)
    assert int(outside_column(grid, T4)[0]) == after.outside_band.expected_bytes == 10**9 + 520_000_000
    assert after.reserved.expected_bytes == expected * 1100 // 1000
