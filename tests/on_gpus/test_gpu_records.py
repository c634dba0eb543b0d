"""Records from GPUs: the page follows from them, they are complete and hold nothing private, and figures are derived from them.

Where a test needs other records than the kept ones, it makes them up.
"""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.measured_twins import twin
from tests.on_gpus import calibrate, gpu_check, gpu_page, gpu_records
from tests.on_gpus import figures as figures_module
from tests.on_gpus.figures import FAR, Figure, Source, cause_of, sources
from zeroplan import estimate
from zeroplan.engines.device_figures import figures
from zeroplan.engines.requests.log import Log
from zeroplan.ledger import Phase
from zeroplan.measurement import AllocatorMeasured, AttentionMeasured, BlocksMeasured, CardMeasured, Environment, Measurement
from zeroplan.replay import StepReplay
from zeroplan.verify.cases.results import Result, opened
from zeroplan.verify.record import write_record
from zeroplan.verify.task import Task

GB = 10**9
WHERE = Environment(
    python="3.12.3", platform="Linux-6.18.44-x86_64-with-glibc2.39", device="NVIDIA H200, CUDA 13.0, driver 580.159.03",
    packages={"zeroplan": "0.1.0", "torch": "2.11.0", "transformers": "5.17.0"}, date="2026-11-20",
)  # fmt: skip
CARD = CardMeasured(name="NVIDIA H200", total_bytes=150 * GB, used_bytes=9 * GB, outside_bytes=640_000_000, driver="580.159.03",
                    cuda="13.0", nccl="2.28.9", context_bytes=520_000_000, joined_bytes=530_000_000)  # fmt: skip


def made_up(*, factor: float = 1.0, **said: Any) -> Measurement:
    """Return a made-up record of a GPU: the estimate's peaks times a factor, with a tenth more reserved."""
    record = twin(model="gpt2", gpus=4, stage=3, seq_len=128, gpu="h200")
    answer = estimate(record.job)
    peak, took = int(answer.peak_bytes * factor), int(answer.reserved.expected_bytes * 1.1)
    blocks = BlocksMeasured(
        allocated_bytes=peak, requested_bytes=peak, active_bytes=peak, reserved_bytes=took, seconds=0.125
    )  # fmt: skip
    phases = tuple(replace(phase, peak_bytes=min(peak, phase.peak_bytes), blocks=blocks) for phase in record.steady.phases)
    highest = replace(max(phases, key=lambda phase: phase.peak_bytes), peak_bytes=peak)
    step = replace(record.steady, phases=tuple(highest if one.phase == highest.phase else one for one in phases))
    shown = AllocatorMeasured(
        settings="default", allocated_bytes=peak, reserved_bytes=took, workspace_bytes=2 * 40 * 2**20, modelled=False
    )
    attention = AttentionMeasured(operators=("aten::_scaled_dot_product_cudnn_attention_backward",), scratch_bytes=777)
    given = {
        "backend": "cuda",
        "tensors": "cuda",
        "kernels": "cuda",
        "process_group": "fake",
        "environment": WHERE,
        "card": CARD,
        "remarks": (),
    }
    return replace(record, steps=(step, step), allocator=(shown,), attention=attention, **{**given, **said})


def kept(folder: Path, *records: Measurement, out_of_memory: bool = False) -> Path:
    """Write a file of results in the form that a matrix leaves, and return its path."""
    path = folder / "one-140gb-cuda.jsonl"
    with opened(path, say=print) as results:
        for number, record in enumerate(records):
            task = Task(job=record.job, transport="fake", tensors="cuda", rank=number)
            results.append(Result(name=f"case {number}", task=task, outcome="measured", record=record, card="NVIDIA H200",
                                  card_bytes=150 * GB))  # fmt: skip
        if out_of_memory:
            task = Task(job=records[0].job, transport="fake", tensors="cuda", rank=3)
            results.append(Result(name="huge", task=task, outcome="out of memory", card="NVIDIA H200", card_bytes=GB))
    return path


# The page


@pytest.fixture(autouse=True)
def without_others_reserves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the section whose replays take long, except where the whole page is compared."""
    if request.function is not test_the_page_says_what_the_kept_records_say:
        monkeypatch.setattr(gpu_page, "_reserved_elsewhere", tuple)


def test_the_page_says_what_the_kept_records_say():
    """`python -m tests.on_gpus.gpu_page` rewrites the page."""
    assert gpu_page.page(gpu_records.seen(), sources()) == gpu_page.PAGE.read_text(encoding="utf-8")


def test_replays_of_fsdp1_and_of_deepspeed_0_to_2_are_what_a_gpu_counted():
    """All jobs built their model on the GPU. The GPU kept up with the CPU, since jobs are small and the profiler slows the CPU.

    If the GPU is as far behind as the program allows, blocks that other streams still use cannot be reused. The additional reserved
    memory is at most what is busy in this way at once.
    """
    engines = [("fsdp1", 2), ("fsdp1", 3), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2)]
    every = [one.record for one in gpu_records.seen() if one.record is not None]
    records = [one for one in every if (one.job.recipe.engine, one.job.recipe.zero_stage) in engines]
    assert len(records) == 9
    for record in records:
        truth = record.allocator[0]
        shown = StepReplay(record.job, starts="built", keeps_up=True).replayed()
        assert abs(shown.allocated_bytes / truth.allocated_bytes - 1) < 1e-4
        assert abs(shown.reserved_bytes - truth.reserved_bytes) <= 2 * 2**20
        step = StepReplay(record.job, starts="built")
        behind = step.replayed()
        assert -2 * 2**20 <= behind.reserved_bytes - truth.reserved_bytes <= _busy(step.log) + 2 * 2**20


def _busy(log: Log) -> int:
    """Return the most bytes that are freed but still used by another stream, if the GPU runs only what the program waits for."""
    busy, most = dict[int, int](), 0
    for at, event in enumerate(log.events):
        busy = {gone: n_bytes for gone, n_bytes in busy.items() if gone > log.waits.get(at, -1)}
        if event < 0 and -1 - event in log.marked:
            busy[at] = log.requests[-1 - event].n_bytes
        most = max(most, sum(busy.values()))
    return most


def test_muon_sends_under_fsdp2_what_a_gpu_sent():
    (record,) = [
        one.record for one in gpu_records.seen() if one.record is not None and one.record.job.recipe.optimizer == "muon"
    ]
    sent = {(one.operation, one.calls, one.n_bytes) for one in record.collectives if one.phase == "optimizer step"}
    calls = [one for one in estimate(record.job).traffic.collectives if one.phase is Phase.STEP]
    assert {(one.operation, one.calls, one.payload_bytes) for one in calls} == sent
    assert len(sent) == 2


def test_kept_records_are_complete_and_contain_nothing_private():
    assert {path.name: gpu_check.problems(path) for path in gpu_records.files()} == {
        path.name: [] for path in gpu_records.files()
    }


def test_without_a_record_the_page_says_so_first():
    page = gpu_page.page([], sources())
    assert page.splitlines()[2].startswith("**No record of a GPU is kept here yet")
    assert (
        "| 20 linear layers, DDP on 2 GPUs, Adam | not stated | 1.8 | not stated | peak allocated | 1,697 MB | 1,697 MB |"
        in page
    )


def test_a_record_is_a_row_with_where_it_was_taken(tmp_path: Path):
    kept(tmp_path, made_up(), made_up(factor=1 / 1.01), out_of_memory=True)
    page = gpu_page.page(gpu_records.seen(tmp_path), ())
    assert (
        "Driver 580.159.03, torch 2.11.0, CUDA 13.0, 2026-11-20; 3 cases, off by 0.50% in the median and 1.00% at most" in page
    )
    assert "| peak allocated of every case within 2% | 100 % | 100.0% of 2 |" in page
    assert "| verdict right, outside 2% of the capacity | 100 % | 100.0% of 3 |" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| case 1 |")]
    assert "| +1.00% |" in row
    assert "| fits, ran | 0.375 |" in row
    assert "| does not fit, out of memory |  |" in page
    assert "No record of a GPU" not in page


def test_a_wrong_verdict_and_a_peak_beyond_two_percent_show(tmp_path: Path):
    wrong = made_up(factor=1.1, card=replace(CARD, total_bytes=GB))
    write_record(wrong, tmp_path)
    page = gpu_page.page(gpu_records.seen(tmp_path), ())
    assert "| peak allocated of every case within 2% | 100 % | 0.0% of 1 |" in page
    assert "| verdict right, outside 2% of the capacity | 100 % | 0.0% of 1 |" in page


def test_cases_are_summed_by_engine_and_stage(tmp_path: Path):
    kept(tmp_path, made_up(factor=1 / 1.01), made_up(factor=1.02), out_of_memory=True)
    page = gpu_page.page(gpu_records.seen(tmp_path), ())
    assert "| fsdp2 | 3 | 3 | 2 | -0.48 % | 1.48 % | -1.96 % | +1.00 % | 100.0% of 2 |" in page


# Figures of others


def figure(measured: float, found: float, name: str = "a row", **said: str) -> Figure:
    return Figure("a source", "fsdp1", "LoRA", "A100", name, measured, found, **said)


def test_figures_are_summed_with_their_sign_and_the_far_ones_listed():
    figures = (figure(100, 99), figure(100, 102), figure(100, 94, "far"), figure(100, 104, "explained", why="a known one"))
    source = Source("a source", "somewhere", "peak", figures, Counter({"a model of another kind": 6}))
    page = gpu_page.page([], (source,))
    assert "| estimate | a source | fsdp1 | LoRA | A100 | 4 | +0.50 % | 3.00 % | 6.00 % | -6.00 % | +4.00 % |" in page
    assert "| a source | rows that have an estimate | 40 % of 10 |" in page
    assert "|  | a model of another kind | 6 |" in page
    assert "more than 3 % off: 2. Of these, 1 are *open*" in page
    assert "| far | A100 | estimate | -6.0 % | open |" in page
    assert "| explained | A100 | estimate | +4.0 % | a known one |" in page


def test_a_cause_needs_source_name_gpu_and_direction():
    cause = {"source": "a source", "names": ["row"], "gpu": "A100", "high": True, "cause": "known"}
    assert cause_of(figure(100, 104), [cause]) == "known"
    assert cause_of(figure(100, 96), [cause]) == "open"
    assert cause_of(figure(100, 104, "other"), [cause]) == "open"
    assert cause_of(figure(100, 104)._replace(gpu="H100"), [cause]) == "open"
    assert cause_of(figure(100, 104)._replace(source="another"), [cause]) == "open"


def test_every_known_cause_explains_a_row():
    """A cause must be removed when its rows are no longer far off."""
    far = [one for source in sources() for one in source.figures if abs(one.error) > FAR]
    for cause in figures_module.causes():
        assert any(cause_of(one, [cause]) == cause["cause"] for one in far), cause["names"]


# Complete and refused records


def test_a_complete_record_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = kept(tmp_path, made_up(), out_of_memory=True)
    assert gpu_check.main([str(path), str(write_record(made_up(), tmp_path))]) == 0
    assert capsys.readouterr().out.count(": complete") == 2


@pytest.mark.parametrize(("said", "why"), [
    ({"backend": "cpu", "tensors": "cpu"}, "it is of backend cpu"),
    ({"environment": replace(WHERE, packages={"torch": "2.11.0"})}, "lacks the version of zeroplan, transformers"),
    ({"environment": replace(WHERE, date="")}, "date '' is no day"),
    ({"card": replace(CARD, driver="")}, "the card lacks its name, memory, driver or CUDA"),
    ({"card": None}, "the card lacks its name"),
    ({"workload": "mine.module:net"}, "a workload of somebody's own"),
    ({"remarks": ("read from /home/jane/models/x",)}, "it names a path: '/home/jane/models/x'"),
    ({"remarks": (r"read from C:\Users\jane\x",)}, r"it names a path: 'C:\\Users\\jane\\x'"),
    ({"environment": replace(WHERE, platform="Linux on gpu17.cluster")}, "it names a host: 'gpu17.cluster'"),
    ({"environment": replace(WHERE, platform="Linux, 10.1.2.3")}, "it names an address: '10.1.2.3'"),
    ({"remarks": ("ask jane@example.org",)}, "it names an address: 'jane@example.org'"),
    ({"remarks": ("ran on pinkfloyd",)}, "it names this host: 'pinkfloyd'"),
])  # fmt: skip
def test_missing_or_private_parts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], why: str):
    monkeypatch.setattr(gpu_check.socket, "gethostname", lambda: "pinkfloyd")
    for path in (kept(tmp_path, made_up(**said)), write_record(made_up(**said), tmp_path)):
        assert any(why in problem for problem in gpu_check.problems(path)), path
    assert gpu_check.main([str(path)]) == 2


def test_a_file_that_is_no_record_has_one_problem(tmp_path: Path):
    newer, cut, none = (tmp_path / name for name in ("newer.json", "cut.jsonl", "none.jsonl"))
    newer.write_text(json.dumps({**asdict(made_up()), "schema_version": 99}))
    cut.write_text("[1, 2]\n")
    none.write_text("")
    assert ["schema version 99" in gpu_check.problems(newer)[0], "is not a result" in gpu_check.problems(cut)[0]] == [
        True,
        True,
    ]
    assert gpu_check.problems(none) == ["none.jsonl holds no case that was measured"]


# Figures that only hardware can give


def test_figures_are_derived_by_gpu_and_versions(tmp_path: Path):
    """A lone rank gives context and kernels; what NCCL's ranks hold more is communicators. The printed tables can be read back."""
    alone = [made_up(card=replace(CARD, outside_bytes=n_bytes)) for n_bytes in (600_000_000, 640_000_000, 700_000_000)]
    together = made_up(process_group="nccl", card=replace(CARD, outside_bytes=1_140_000_000))
    path = tmp_path / "figures.toml"
    path.write_text(calibrate.tables([*alone, together]))
    found = figures(path)
    assert {(one.gpus, one.torch, one.cuda, one.nccl, one.driver, one.as_of) for one in found} == {
        (("h200-sxm-141gb",), "2.11.0", "13.0", "2.28.9", "580.159.03", "2026-11-20"),
    }  # fmt: skip
    assert [(one.what, one.engine, one.value) for one in found[:-1]] == [
        ("process", "", 600_000_000), ("process", "", 640_000_000), ("process", "", 700_000_000), ("context", "", 520_000_000),
        ("communicator", "", 500_000_000), ("workspace", "", 40 * 2**20),
    ]  # fmt: skip
    reserved = found[-1]
    assert (reserved.what, reserved.engine) == ("reserved", "fsdp2")
    assert 1000 < reserved.value < 1200
    assert "cudnn_attention_backward; scratch 777 bytes, the estimate says" in path.read_text()


def test_each_version_of_torch_has_its_own_figures(tmp_path: Path):
    newer = made_up(environment=replace(WHERE, packages={**WHERE.packages, "torch": "2.12.0"}))
    path = tmp_path / "figures.toml"
    path.write_text(calibrate.tables([made_up(), newer]))
    assert {one.torch for one in figures(path)} == {"2.11.0", "2.12.0"}


def test_calibrate_reads_the_kept_records_by_default():
    said: list[str] = []
    assert calibrate.main([], said.append) == (0 if gpu_records.files() else 2)
    assert said
