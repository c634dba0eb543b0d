"""Plots draw the series; nothing is cut off or covers something else."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from tests.measured_twins import twin
from tests.report import pictured
from zeroplan import estimate, job
from zeroplan.comparison import compare_with_estimate
from zeroplan.errors import SpecError
from zeroplan.planner.asking import Question, ask
from zeroplan.report.palette import LOOKS, THEMES
from zeroplan.report.series.heat import heat
from zeroplan.report.series.pareto import pareto
from zeroplan.report.series.parts import caption
from zeroplan.report.series.run import Stretch
from zeroplan.report.series.scaling import scaling
from zeroplan.report.series.stacks import StacksSeries, stack_of, stack_of_kinds
from zeroplan.report.series.stages import stages
from zeroplan.report.series.timeline import timeline
from zeroplan.report.series.validation import validation
from zeroplan.resolve import Request
from zeroplan.units import GIB, MIB

mpl = pytest.importorskip("matplotlib")
from matplotlib import font_manager  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import to_hex, to_rgba  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402

from zeroplan.report.plots import frame  # noqa: E402
from zeroplan.report.plots.run import _phase_names  # noqa: E402
from zeroplan.report.plots.timeline import draw_timeline  # noqa: E402

LLAMA = job(model="llama-3.1-8b", gpus=8, gpu="h100", seq_len=8192)
OFFLOADED = job(model="llama-3.1-8b", gpus=8, engine="deepspeed", stage=3, offload_optimizer="cpu", gpu="a100-sxm-80gb")
BEYOND = job(model="llama-3.1-405b", gpus=512, gpu="h100", recompute="full", micro_batch=4)
RECORD = twin(factor=0.9)
PLANNED = Request(model="llama-3.1-8b", gpus=8, gpu="h100", seq_len=4096)
RUNS = [(one, compare_with_estimate(one)) for one in (twin(factor=factor) for factor in (0.99, 0.5, 1.3))]

CASES: dict[str, Callable[[], object]] = {
    "stages": lambda: stages(LLAMA),
    "stages beyond": lambda: stages(BEYOND),
    "stages made up": pictured.stages,
    "stages refused": lambda: stages(job(model="llama-3.1-8b", gpus=4, engine="deepspeed", stage=2, lora_rank=16)),
    "timeline": lambda: timeline(LLAMA),
    "timeline offloaded": lambda: timeline(OFFLOADED),
    "timeline long": lambda: timeline(job(model="deepseek-v3", gpus=1024, gpu="h200")),
    "timeline record": lambda: timeline(RECORD.job, RECORD),
    "scaling": lambda: scaling(LLAMA),
    "scaling experts": lambda: scaling(job(model="mixtral-8x7b", gpus=8, gpu="h200", recompute="full")),
    "stacks": lambda: StacksSeries(
        caption=caption(estimate(LLAMA), "Two ways"),
        stacks=tuple(
            stack_of(name, estimate(one)) for name, one in (("on the GPU", LLAMA), ("optimizer offloaded", OFFLOADED))
        ),
        capacity_bytes=80 * GIB,
    ),
    "stacks small": lambda: StacksSeries(
        caption=caption(estimate(LLAMA), "What a run held"), stacks=(stack_of_kinds("rank 0", {"parameters": 7_000_000}),)
    ),
    "heat": lambda: heat(LLAMA),
    "heat beyond": lambda: heat(BEYOND),
    "heat params": lambda: heat(job(params="7e9", gpus=8)),
    "pareto": lambda: pareto(ask(PLANNED, Question(global_batch=64))),
    "pareto of nothing": lambda: pareto(ask(replace(PLANNED, gpus=1, gpu="l4-24gb", model="llama-3.1-405b"), Question())),
    "validation few": lambda: validation(RUNS, limits=(0.02,)),
    "validation many": lambda: validation(RUNS * 8, limits=(0.0025, 0.01)),
}


@functools.cache
def made(case: str) -> object:
    return CASES[case]()


@functools.cache
def drawn(case: str, theme: str = "light") -> Figure:
    kind = case.partition(" ")[0]
    with frame.style(THEMES[theme]):
        figure = frame.blank()
        getattr(import_module(f"zeroplan.report.plots.{kind}"), f"draw_{kind}")(figure, made(case), THEMES[theme])
        figure.draw_without_rendering()
    return figure


def texts(figure: Figure) -> Iterator[Text]:
    """Return the texts without tick labels, some of which lie beyond the axes' ends."""
    at_axes = {
        id(label)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
    }
    return (text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and id(text) not in at_axes)


@pytest.mark.parametrize("case", CASES)
def test_no_word_is_cut_off_or_touches_its_neighbour_below_the_axis(case: str):
    figure = drawn(case)
    for text in texts(figure):
        box = text.get_window_extent()
        assert -1 <= box.x0 < box.x1 <= figure.bbox.width + 1, text.get_text()
        assert -1 <= box.y0 < box.y1 <= figure.bbox.height + 1, text.get_text()
    for axes in figure.axes:
        low, high = sorted(axes.get_xlim())
        labels = [label for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if low <= at <= high]
        boxes = [label.get_window_extent() for label in labels if label.get_text()]
        assert all(box.y0 >= -1 for box in boxes)
        for box, other in pairwise(boxes):
            assert box.x1 <= other.x0 + 0.5, [label.get_text() for label in labels]


@pytest.mark.parametrize("case", ["scaling", "validation few"])
def test_words_are_in_the_ink_of_the_theme(case: str):
    for name, theme in THEMES.items():
        figure = drawn(case, name)
        assert to_hex(figure.get_facecolor()).upper() == theme.paper
        assert to_hex(figure.axes[0].yaxis.label.get_color()).upper() == theme.ink


def bands(axes: Axes) -> list[tuple[float, float]]:
    """Return the middle and height of every coloured rectangle, without hatches."""
    filled = [patch for patch in axes.patches if to_rgba(patch.get_facecolor())[3] > 0]
    return [(round(patch.get_x() + patch.get_width() / 2), patch.get_height()) for patch in filled]


def test_a_column_is_as_high_as_what_is_needed():
    series, axes = made("stages"), drawn("stages").axes[0]
    for at, column in enumerate(series.columns):
        heights = [height for middle, height in bands(axes) if middle == at]
        assert heights == [part.n_bytes / GIB for part in column.parts]
        assert sum(heights) == pytest.approx(column.needed_bytes / GIB, rel=1e-12)
    assert series.capacity_bytes / GIB in [line.get_ydata()[0] for line in axes.lines]


def test_stacks_are_as_high_as_their_estimates_and_small_ones_are_in_mib():
    for case, unit in (("stacks", GIB), ("stacks small", MIB)):
        series, axes = made(case), drawn(case).axes[0]
        for at, stack in enumerate(series.stacks):
            assert sum(height for middle, height in bands(axes) if middle == at) == pytest.approx(stack.total_bytes / unit)
    assert [line.get_ydata()[0] for line in drawn("stacks").axes[0].lines] == [80 * GIB / GIB]
    assert any("GiB\nfits" in text.get_text() for text in texts(drawn("stacks")))


def test_a_notebook_shows_a_series_as_png():
    from zeroplan.report.plots.inline import picture

    png, shown = picture(made("stages"))._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert shown == {"width": 8 * 96}


@pytest.mark.parametrize("case", ["stages beyond", "stages made up"])
def test_far_higher_columns_are_in_a_panel_of_their_own_scale_and_zoomed_in_beside(case: str):
    series = made(case)
    small, large = drawn(case).axes
    for axes in (small, large):
        for at, column in enumerate(series.columns):
            assert [height for middle, height in bands(axes) if middle == at] == [part.n_bytes / GIB for part in column.parts]
    assert small.get_ylim()[1] > max(column.needed_bytes / GIB for column in series.columns) > large.get_ylim()[1]
    assert large.get_ylim()[1] > series.capacity_bytes / GIB
    sizes = [one.needed_bytes / GIB for one in series.columns if one.parts]
    totals = {f"{size:,.0f} GiB" if size >= 1000 else f"{size:,.1f} GiB" for size in sizes}
    assert totals <= {text.get_text().partition("\n")[0] for text in large.texts}


@pytest.mark.parametrize("case", ["stages", "stages beyond", "stages made up"])
def test_no_number_of_a_column_lies_on_another(case: str):
    boxes = [text.get_window_extent() for axes in drawn(case).axes for text in axes.texts if text.get_text().strip()]
    assert not [(one, other) for one, other in combinations(boxes, 2) if one.overlaps(other)]


def test_the_bands_of_a_step_end_at_its_totals_and_the_arrow_at_the_peak():
    series, axes = made("timeline"), drawn("timeline").axes[0]
    tops = [max(y for _, y in band.get_paths()[0].vertices) for band in axes.collections if band.get_label() in LOOKS]
    peak = series.instants[series.peak]
    assert max(tops) == pytest.approx(peak.total_bytes / GIB)
    (arrow,) = [text for text in axes.texts if text.get_text().startswith("peak ")]
    assert arrow.get_text() == f"peak {peak.total_bytes / GIB:,.2f} GiB: {peak.name}"
    assert arrow.xy[1] == peak.total_bytes / GIB
    assert sum("blocks, alike" in text.get_text() for text in axes.texts) == 2


def test_a_record_is_a_line_over_each_phase():
    series, axes = made("timeline record"), drawn("timeline record").axes[0]
    levels = {line.get_ydata()[0] for line in axes.lines if len(set(line.get_ydata())) == 1}
    assert {one.n_bytes / GIB for one in series.measured} <= levels


def test_a_run_is_a_stair_of_its_blocks_and_of_those_between():
    series = pictured.timeline()
    with frame.style(THEMES["light"]):
        figure = frame.blank()
        draw_timeline(figure, series, THEMES["light"])
    stairs = [[float(y) for y in line.get_ydata()] for line in figure.axes[0].lines if len(line.get_ydata()) > 2]
    forward, backward = series.levels[:3], series.levels[3:]
    for drawn_ones, levels in zip(stairs, (forward, backward), strict=True):
        assert drawn_ones[::2] == [n_bytes / GIB for one in levels for n_bytes in (*one.skipped, one.n_bytes)]
        assert drawn_ones[::2] == drawn_ones[1::2]


def test_a_ring_is_where_a_stage_begins_to_fit():
    series, axes = made("scaling"), drawn("scaling").axes[0]
    begins = {line.fits_from.gpus for line in series.lines if line.fits_from}
    rings = {line.get_xdata()[0] for line in axes.lines if line.get_markerfacecolor() == "none"}
    assert rings == begins == {7, 64}
    assert "fits from 8 GPUs, but not on 64" in "\n".join(text.get_text() for text in texts(drawn("scaling experts")))


def test_every_layout_has_a_mark_and_the_best_a_star_on_the_front():
    series, axes = made("pareto"), drawn("pareto").axes[0]
    places = {
        (float(x), float(y))
        for line in axes.lines
        if line.get_linestyle() == "None" and line.get_marker() not in ("*", "o")
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert {(spot.needed_bytes / GIB, spot.tokens_per_s) for spot in series.spots if spot.engine != "ddp"} == places
    (star,) = [line for line in axes.lines if line.get_marker() == "*"]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (series.best.needed_bytes / GIB, series.best.tokens_per_s)
    words = " ".join(" ".join(text.get_text().split()) for text in texts(drawn("pareto")))
    assert series.best.words in words
    assert all(f"{engine}, " in words for engine in {spot.engine for spot in series.spots})
    assert all(f"a knee: {one.needed_bytes / GIB:,.1f} GiB" in words for one in series.knees)


def test_a_map_has_a_cell_for_every_pair():
    series, axes = made("heat"), drawn("heat").axes[0]
    mesh = axes.collections[0].get_array()
    assert mesh.shape == (len(series.micro_batches), len(series.seq_lens))
    assert mesh.max() == max(map(max, series.needed_bytes)) / GIB


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_picture_is_the_same_file_whatever_the_settings(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = tmp_path / f"one.{ending}", tmp_path / f"two.{ending}"
    for path in (first, second):
        with frame.style(THEMES["light"]):
            drawn.cache_clear()
            frame.written(drawn("scaling"), path, force=False)
        monkeypatch.setitem(mpl.rcParams, "font.size", 30.0)
        monkeypatch.setitem(mpl.rcParams, "font.family", ["serif"])
    assert first.read_bytes() == second.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_fonts_come_with_matplotlib():
    with frame.style(THEMES["light"]):
        found = font_manager.findfont(font_manager.FontProperties(family=mpl.rcParams["font.family"]))
    assert Path(found).is_relative_to(mpl.get_data_path())


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(SpecError, match="cannot be written"):
        frame.written(drawn("scaling"), Path(__file__) / "one.png", force=False)
    with pytest.raises(SpecError, match="does not end in"):
        frame.written(drawn("scaling"), tmp_path / "one.jpg", force=False)
    assert not list(tmp_path.iterdir())


def test_names_of_phases_do_not_lie_upon_each_other():
    lasts = [10, 13, 14, 17, 18, 21, 22, 60, 62]
    names = ["forward", *("backward", "forward") * 3, "backward", "optimizer step"]
    crowded = [Stretch(name=name, first=last, last=end) for name, last, end in zip(names, [0, *lasts], lasts, strict=False)]
    assert [name for name, _ in _phase_names(crowded, 0.6)] == ["forward", *"BFBFBF", "backward", "optimizer step"]
    assert {level for _, level in _phase_names(crowded, 0.6)} == {0}
    assert [name for name, _ in _phase_names(crowded, 0.05)] == names
