"""Many cases in one matrix file: how the file is read, which results are kept, and how the cases are run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.measured_twins import twin
from zeroplan.cli import verify_bulk
from zeroplan.cli.app import main
from zeroplan.errors import MeasurementError, SpecError, ZeroplanError
from zeroplan.estimator import estimate
from zeroplan.measurement import PhaseMeasured
from zeroplan.verify.cases import needs
from zeroplan.verify.cases.bulk import Runner
from zeroplan.verify.cases.matrix import Case, find_matrix, read_matrix, shipped
from zeroplan.verify.cases.needs import needed_bytes
from zeroplan.verify.cases.results import Result, opened
from zeroplan.verify.cases.verdicts import BAND, judged
from zeroplan.verify.failures import NotHereError
from zeroplan.verify.processes.launch import Listener
from zeroplan.verify.record import write_record
from zeroplan.verify.task import Card, Task

ROOT = Path(__file__).parents[3]
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512,
}  # fmt: skip


def written(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text)
    return path


# Reading the file


def test_a_list_makes_a_case_of_each_value_and_a_case_overrides_the_defaults(tmp_path: Path):
    path = written(tmp_path, """
        [defaults]
        model = "gpt2"
        gpus = [2, 8]
        seq-len = 512
        [[case]]
        stage = 3
        precision = ["bf16", "fp32"]
        [[case]]
        gpus = 4
        stage = 1
        as_rank = 3
        layers = 2
        steps = 4
        [[case]]  # the same again is the same case
        gpus = 2
        stage = 3
        precision = "fp32"
    """)  # fmt: skip
    cases = read_matrix(path, tensors="cpu")
    assert [case.name for case in cases] == [
        "gpt2 fsdp2-3 r0/2 bf16 1x512", "gpt2 fsdp2-3 r0/2 fp32 1x512",
        "gpt2 fsdp2-3 r0/8 bf16 1x512", "gpt2 fsdp2-3 r0/8 fp32 1x512", "gpt2/2 ddp-1 r3/4 bf16-mixed 1x512",
    ]  # fmt: skip
    last = cases[-1].task
    assert (last.job.model.num_hidden_layers, last.rank, last.steps, last.transport) == (2, 3, 4, "fake")


def test_a_case_can_set_options_of_an_engine(tmp_path: Path):
    settings = ("fsdp2.reshard_after_forward=false", "fsdp2.reshard_after_forward=2")
    path = written(tmp_path, f"[[case]]\nmodel = 'gpt2'\ngpus = 4\nset = {list(settings)}")
    found = [case.task.job.recipe.fsdp2.reshard_after_forward for case in read_matrix(path, tensors="cpu")]
    assert found == [False, 2]


@pytest.mark.parametrize(("text", "said"), [
    ("", "has no case; write [[case]]"),
    ("[[case]]\nmodel = 'gpt2'\n[cases]", "has the unknown key 'cases'"),
    ("[[case]]\nmodel = 'gpt2'\ngpus = []", "case 1: gpus = [] lists no value"),
    ("[defaults]\nseq_len = []\n[[case]]\nmodel = 'gpt2'", "case 1: seq_len = [] lists no value"),
    ("[case", "is not TOML"),
    ("[[case]]\nmodel = 'gpt2'\nstages = 3", "case 1: stages: no such key; nearest: stage"),
    ("[[case]]\nmodel = 'gtp2'", "case 1: unknown model 'gtp2'"),
    ("[[case]]\nmodel = 'gpt2'\n[[case]]\nmodel = 'gpt2'\ngpus = 2\nas_rank = 2", "case 2: as_rank=2 is not one of 2 ranks"),
    ("[[case]]\nmodel = 'gpt2'\ngpus = 4\nnproc = 2", "case 1: nproc=2 does not fit the job's 4 GPUs"),
    ("[[case]]\nmodel = 'gpt2'\nlayers = 99", "case 1: layers=99 is more than the 12 of gpt2"),
    ("[[case]]\nmodel = 'gpt2'\nedge = 0.98", "case 1: edge=0.98 is a share of a card's memory; name the card"),
    ("[[case]]\nmodel = 'llama-2-70b'\ngpu = 'h100'\nedge = 0.98", "case 1: edge=0.98: no batch makes the estimate need that much"),
    ("[[case]]\nmodel = 'gpt2'\nengine = 'paper'", "case 1: engine 'paper' is a formula and cannot be run"),
    ("[defaults]\nmodel = 'gpt2'\ngpus = 2\nengine = 'deepspeed'\nrecompute = 'selective'\n[[case]]\nstage = [2, 3]",
     "case 1: recompute 'selective' at stage 3 fails in DeepSpeed"),
])  # fmt: skip
def test_a_bad_matrix_is_refused_in_one_line(tmp_path: Path, text: str, said: str):
    with pytest.raises(SpecError) as refused:
        read_matrix(written(tmp_path, text), tensors="cpu")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_matrix_is_refused_with_the_names_of_the_shipped_ones():
    with pytest.raises(ZeroplanError, match="one-140gb"):
        find_matrix("one-140")


@pytest.mark.parametrize("name", shipped())
def test_cases_of_the_shipped_matrices_fit_as_intended(name: str):
    """By the estimate: a case at the edge is a little over or under the card, as asked. All others need less than 90 % of it."""
    cases = read_matrix(shipped()[name], tensors="cuda")
    for case in cases:
        answer = estimate(case.task.job)
        share = needed_bytes(answer, alone=case.task.transport == "fake") / (answer.capacity_bytes or 0)
        if "@" in case.name:
            edge = float(case.name.partition("@")[2])
            assert BAND <= abs(share - 1) < BAND + 0.01
            assert (share > 1) == (edge > 1)
        else:
            assert share < 0.9, case.name
    jobs = [case.task.job for case in cases]
    assert {(job.recipe.engine, job.recipe.zero_stage) for job in jobs} >= {
        ("fsdp2", 2), ("fsdp2", 3), ("ddp", 0), ("ddp", 1), *(("deepspeed", stage) for stage in range(4)),
    }  # fmt: skip
    assert {job.model.family for job in jobs} >= {"llama", "qwen3", "gpt2", "mixtral"}


def test_cases_at_the_edge_follow_the_card_at_hand(tmp_path: Path):
    path = written(tmp_path, "[[case]]\nmodel = 'gpt2'\ngpus = 8\ngpu = 'h200'\nstage = 3\nedge = [0.98, 1.02]")
    for card_bytes in (10**10, 141 * 10**9):
        below, above = (case.task.job for case in read_matrix(path, tensors="cuda", card_bytes=card_bytes))
        assert [estimate(one).capacity_bytes for one in (below, above)] == [card_bytes, card_bytes]
        shares = [needed_bytes(estimate(one), alone=True) / card_bytes for one in (below, above)]
        assert 0.97 <= shares[0] <= 0.98
        assert 1.02 <= shares[1] <= 1.03


def test_the_driver_is_asked_for_a_cards_memory_and_may_be_absent(monkeypatch: pytest.MonkeyPatch):
    class Driver:
        found = 0

        def cuInit(self, _: int) -> int:  # noqa: N802  CUDA's name
            return self.found

        def cuDeviceGet(self, _: object, __: int) -> int:  # noqa: N802
            return 0

        def cuDeviceTotalMem_v2(self, total: Any, _: object) -> int:  # noqa: N802
            total._obj.value = 150_109_945_856
            return 0

    def none(_: str) -> Driver:
        raise OSError

    monkeypatch.setattr(needs.ctypes, "CDLL", lambda _: Driver())
    assert needs.card_bytes() == 150_109_945_856
    Driver.found = 100  # no device
    assert needs.card_bytes() is None
    monkeypatch.setattr(needs.ctypes, "CDLL", none)
    assert needs.card_bytes() is None


def test_the_matrix_of_one_card_covers_the_intended_settings():
    cases = read_matrix(shipped()["one-140gb"], tensors="cuda")
    jobs = [case.task.job for case in cases]
    assert len(cases) >= 60
    assert all(case.task.transport == "fake" for case in cases)
    assert {job.mesh.world_size for job in jobs} == {2, 8, 64}
    assert {job.recipe.recompute for job in jobs} == {"none", "selective", "full"}
    assert {job.recipe.precision for job in jobs} == {"bf16-mixed", "bf16", "fp32"}
    assert {job.recipe.optimizer_impl for job in jobs} >= {"fused", "foreach"}
    assert (min(job.batch.seq_len for job in jobs), max(job.batch.seq_len for job in jobs)) == (512, 32_768)


# Keeping results


def result(name: str = "a", **said: Any) -> Result:
    job = replace(twin().job)
    return Result(**{"name": name, "task": Task(job=job, transport="fake"), "outcome": "measured", "record": twin(), **said})


def test_a_result_is_found_again_by_its_task(tmp_path: Path):
    path, said = tmp_path / "deep" / "r.jsonl", list[str]()
    first, other = result(), result("b", task=replace(result().task, steps=7), outcome="out of memory", says="no more")
    with opened(path, say=said.append) as results:
        results.append(first)
        results.append(other)
        with pytest.raises(MeasurementError, match="another run is writing"), opened(path, say=said.append):
            pass
    with opened(path, say=said.append) as results:
        assert results.found == [first, other]
        assert results.of(replace(other.task, folder="/elsewhere", timeout_s=9.0)) == other
        assert results.of(replace(other.task, steps=8)) is None
    assert not said


def test_a_half_written_last_line_is_dropped_and_the_rest_kept(tmp_path: Path):
    path, said = tmp_path / "r.jsonl", list[str]()
    with opened(path, say=said.append) as results:
        results.append(result())
        results.append(result("b", outcome="failed"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with opened(path, say=said.append) as results:
        assert [one.name for one in results.found] == ["a"]
        results.append(result("b", outcome="failed"))
    assert path.read_bytes() == whole
    assert results.dropped == len(whole.splitlines(keepends=True)[1]) - 40


@pytest.mark.parametrize("content", ["my notes\n", "my notes", "[1, 2]\n", '{"a": 1}\n', '{"a": 1}'])
def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path, content: str):
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(SpecError, match=r"r\.jsonl"), opened(path, say=print):
        pass
    assert path.read_text() == content


def test_results_are_compared_where_there_is_no_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "r.jsonl"
    with opened(path, say=print) as results:
        results.append(result())
    with pytest.raises(SystemExit):
        main(["compare", str(path)])
    from_results = capsys.readouterr().out
    record = write_record(twin(), tmp_path / "records")
    with pytest.raises(SystemExit):
        main(["compare", str(record)])
    assert from_results == capsys.readouterr().out != ""


# Whether the estimate was right

ON_A_CARD = {"outcome": "out of memory", "record": None, "says": "CUDA out of memory"}


@pytest.mark.parametrize(("share", "said", "agrees"), [
    (1.05, ON_A_CARD, True), (0.5, ON_A_CARD, False), (0.99, ON_A_CARD, True),
    (0.5, {}, True), (1.05, {}, False), (1.01, {}, True), (0.5, {"outcome": "failed", "record": None}, None),
])  # fmt: skip
def test_a_verdict_counts_as_wrong_only_outside_the_band(share: float, said: dict[str, Any], *, agrees: bool | None):
    needed = needed_bytes(estimate(twin().job), alone=True)
    task = Task(job=twin().job, transport="fake", tensors="cuda")
    exact = replace(twin(), steps=(_as_estimated(),), collectives=())
    one = judged(result(**{"task": task, "record": exact, "card_bytes": int(needed / share), **said}), tolerance=float("inf"))
    assert one.agrees is agrees


@pytest.mark.parametrize(("said", "agrees"), [(ON_A_CARD, True), ({}, False)])
def test_where_the_allocator_may_need_more_than_is_left_a_replay_decides(said: dict[str, Any], *, agrees: bool):
    """The estimate leaves a twentieth of the card free, and this job's replay runs out of memory."""
    needed = needed_bytes(estimate(twin().job), alone=True)
    task = Task(job=twin().job, transport="fake", tensors="cuda")
    exact = replace(twin(), steps=(_as_estimated(),), collectives=())
    one = judged(result(**{"task": task, "record": exact, "card_bytes": int(needed / 0.95), **said}), tolerance=float("inf"))
    assert (one.fits_in_replay, one.fits, one.agrees) == (False, False, agrees)


def test_only_ranks_over_nccl_need_room_for_communicators():
    alone, together = (
        judged(result(task=Task(job=twin().job, transport=transport, tensors="cuda")), tolerance=1.0).needed
        for transport in ("fake", "nccl")
    )
    assert together == estimate(twin().job).least_bytes == alone + 520_000_000


def _as_estimated() -> Any:
    steady = twin().steady
    peak = estimate(twin().job).peak_bytes
    return replace(steady, phases=(PhaseMeasured(phase="forward", peak_bytes=peak, kinds={}),), held_bytes=peak)


# Running the cases


def test_if_a_fork_cannot_use_the_card_its_case_and_all_later_ones_run_in_fresh_processes():
    copied: list[bool] = []
    nobody_can = False

    class Played(Runner):
        def _run(self, task: Task, to: Listener) -> None:
            copied.append(self._may_be_forked(task))
            if copied[-1] or nobody_can:
                raise NotHereError("GPU 0 cannot be used: Cannot re-initialize CUDA in forked subprocess")
            to.card(Card(name="played", total_bytes=7))
            to.keep(twin())

    case = Case("a", Task(job=twin().job, transport="fake", tensors="cuda"))
    with Played(print) as runner:
        first, second = runner.run(case), runner.run(case)
        assert (first.outcome, first.record, first.card_bytes, second.outcome) == ("measured", twin(), 7, "measured")
        assert copied == [True, False, False]
        nobody_can = True
        with pytest.raises(NotHereError):
            runner.run(case)


def test_cases_of_an_engine_that_is_not_installed_are_refused_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = written(tmp_path, "[[case]]\nmodel = 'gpt2'\ngpus = 4\nengine = ['deepspeed', 'ddp']\nstage = 1\nseq_len = 128")

    def require(job: Any) -> None:
        if job.recipe.engine == "deepspeed":
            raise MeasurementError("deepspeed is not installed")

    def run_cases(cases: Any, **_: object) -> Iterator[Result]:
        assert [case.task.job.recipe.engine for case in cases] == ["ddp"]
        yield result(cases[0].name, task=cases[0].task)

    monkeypatch.setattr(verify_bulk, "require", require)
    monkeypatch.setattr(verify_bulk, "run_cases", run_cases)
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--matrix", str(path), "--backend", "cpu", "--record-dir", str(tmp_path)])
    assert ended.value.code == 4
    assert "refused: deepspeed is not installed" in capsys.readouterr().out
    assert [json.loads(line)["outcome"] for line in (tmp_path / "some-cpu.jsonl").read_text().splitlines()] == [
        "refused",
        "measured",
    ]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / "config.json").write_text(json.dumps({**TINY, "hidden_size": 2**16, "vocab_size": 10**7}))
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not left_over(tmp_path)


def left_over(folder: Path) -> list[int]:
    """Return the ids of zeroplan's processes whose TMPDIR is in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            ours = f"TMPDIR={folder}".encode() in path.read_bytes() and b"zeroplan" in (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if ours:
            found.append(int(path.parent.name))
    return found


MATRIX = """
[defaults]
config = "config.json"
gpus = 2
seq_len = 32
[[case]]
stage = 3
recompute = ["none", "full"]
[[case]]
stage = 3
precision = "fp16-mixed"  # which CPU tensors have not
[[case]]
stage = 3
config = "huge/config.json"  # whose embedding no host has room for
gpu = "h100"
"""


def started(here: Path, *arguments: str) -> "subprocess.Popen[str]":
    said = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(here / "scratch"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zeroplan", "verify", "--matrix", "some.toml", "--backend", "cpu", *arguments]
    return subprocess.Popen(command, cwd=here, env=said, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.torch
def test_engines_run_the_cases_and_cases_without_a_result_run_again(here: Path):
    """Killed runs are tested in test_faults.py, without engines."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    written(here, MATRIX)
    kept = here / "records" / "some-cpu.jsonl"
    out, err = started(here, "--record-dir", "records").communicate(timeout=240)
    assert "1/4 " in err
    assert "4 cases: 3 agree within 2.0%, 0 disagree, 1 not judged." in out
    assert "fp16-mixed 1x32, refused: fp16-mixed needs CUDA's kernels" in out
    again = started(here, "--record-dir", "records", "--json")
    out, err = again.communicate(timeout=120)
    assert "3 of 4 cases have a result already; 1 failed or was refused and is tried again" in err
    assert again.returncode == 4  # one case still has no result
    assert [case["agrees"] for case in json.loads(out)["cases"]] == [True, True, None, True]
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["measured", "measured", "refused", "out of memory", "refused"]
