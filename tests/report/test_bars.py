"""Pictures as text have the requested width, bars in proportion to the bytes, and are readable without colours and symbols."""

from collections import Counter
from collections.abc import Callable

import pytest

from tests.measured_twins import twin
from zeroplan import job
from zeroplan.comparison import compare_with_estimate
from zeroplan.report import bars
from zeroplan.report.bars import Row
from zeroplan.report.palette import LOOKS
from zeroplan.report.series.heat import heat
from zeroplan.report.series.scaling import scaling
from zeroplan.report.series.stages import stages
from zeroplan.report.series.timeline import timeline
from zeroplan.report.series.validation import validation

LLAMA = job(model="llama-3.1-8b", gpus=8, gpu="h100", seq_len=8192)
RECORD = twin(factor=0.9)
REFUSED = job(model="llama-3.1-8b", gpus=8, engine="deepspeed", stage=2, recompute="selective", gpu="h100")

ROWS: dict[str, Callable[[int, bool], list[Row]]] = {
    "stages": lambda width, signs: bars.stages_bars(stages(LLAMA), width=width, signs=signs),
    "timeline": lambda width, signs: bars.timeline_bars(timeline(RECORD.job, RECORD), width=width, signs=signs),
    "scaling": lambda width, signs: bars.scaling_bars(scaling(LLAMA), width=width, signs=signs),
    "scaling refused": lambda width, signs: bars.scaling_bars(scaling(REFUSED), width=width, signs=signs),
    "stages refused": lambda width, signs: bars.stages_bars(stages(REFUSED), width=width, signs=signs),
    "heat": lambda width, signs: bars.heat_bars(heat(LLAMA), width=width, signs=signs),
    "validation": lambda width, signs: bars.validation_bars(
        validation([(RECORD, compare_with_estimate(RECORD))], limits=(0.02,)), width=width, signs=signs
    ),
}
each_kind = pytest.mark.parametrize("kind", ROWS)


def lines(rows: list[Row]) -> list[str]:
    return ["".join(segment.text for segment in row).rstrip() for row in rows]


@each_kind
@pytest.mark.parametrize("width", [80, 120])
def test_no_row_is_wider_than_the_terminal(kind: str, width: int):
    assert max(map(len, lines(ROWS[kind](width, True)))) <= width


@each_kind
def test_without_signs_there_is_ascii_alone(kind: str):
    assert "\n".join(lines(ROWS[kind](100, False))).isascii()


@each_kind
def test_a_wider_terminal_has_longer_bars(kind: str):
    longest = [max(map(len, lines(ROWS[kind](width, True)))) for width in (70, 140)]
    assert longest[0] < longest[1]


def test_a_bar_is_made_of_its_parts_in_proportion():
    series, room = stages(LLAMA), 128 - 9 - 30
    row = next(line for line in lines(ROWS["stages"](128, True)) if line.startswith("stage 0"))
    cells, column = Counter(row), series.columns[0]
    for part in column.parts:
        assert cells[LOOKS[part.what].sign] == pytest.approx(part.n_bytes / column.needed_bytes * room, abs=1.01), part.what


def test_the_peak_is_marked_once_and_a_record_follows_each_phase():
    text = lines(ROWS["timeline"](100, True))
    assert sum("◀ peak" in line for line in text) == 1
    assert sum(line.startswith("  measured, ") for line in text) == len(RECORD.steady.phases)


def test_where_a_stage_begins_to_fit_is_said():
    text = lines(ROWS["scaling"](100, True))
    assert text[-4:] == [
        "stage 0, DDP: does not fit",
        "stage 1, DDP + ZeroRedundancyOptimizer: does not fit",
        "stage 2, FSDP2, reshard_after_forward=False: fits tightly from 64 GPUs",
        "stage 3, FSDP2: fits tightly from 7 GPUs",
    ]


def test_the_job_is_starred_among_what_fits_and_what_does_not():
    text = lines(ROWS["heat"](100, True))
    assert sum("*76.0▒" in line for line in text) == 1
    assert "137█" in "\n".join(text)
