"""FLOPs, reads and writes of a step's operators agree with closed formulas and torch's counter; stream waits are recorded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.dryrun.running import SCRIPTS, Run, dry_run
from zeroplan.saved_runs.files import read_saved
from zeroplan.script_trace import OperatorsRecorded

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
_SCRIPT = SCRIPTS / "small_transformer.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operators")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    found = dry_run("--gpus", "2", "--save", "run.gz", "--", str(_SCRIPT), folder=folder)
    assert found.code == 0, found.errors
    return found


@pytest.fixture(scope="module")
def operators(run: Run, folder: Path) -> OperatorsRecorded:
    trace = read_saved(folder / "run.gz").trace
    assert run.code == 0
    assert trace is not None
    assert trace.operators is not None
    return trace.operators


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("small_transformer", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _of(operators: OperatorsRecorded, word: str) -> list[int]:
    return [at for at, name in enumerate(operators.name) if word in operators.names[name]]


def test_the_flops_are_those_of_the_closed_formula(run: Run, script: Any):
    """6 FLOPs per matrix parameter and token; for attention without a mask, 12 per layer, token, key and hidden channel."""
    tokens = script.ROWS * script.SEQ
    matrices = script.LAYERS * 12 * script.HIDDEN**2 + script.VOCAB * script.HIDDEN
    attention = 12 * script.LAYERS * tokens * script.SEQ * script.HIDDEN
    found = run.answer["operators"]
    assert (found["flops"], found["recomputed_flops"]) == (6 * matrices * tokens + attention, 0)


def test_torchs_counter_finds_the_same_flops_with_real_tensors(run: Run, script: Any):
    from torch.utils.flop_counter import FlopCounterMode

    model = script.Model()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(script.ROWS, script.SEQ, dtype=torch.int64)).backward()
    assert run.answer["operators"]["flops"] == counter.get_total_flops()


def test_flops_of_recomputed_layers_are_counted_separately(run: Run, script: Any, tmp_path: Path):
    again = dry_run("--gpus", "2", "--", str(_SCRIPT), "--again", folder=tmp_path).answer["operators"]
    assert again["flops"] - again["recomputed_flops"] == run.answer["operators"]["flops"]
    tokens = script.ROWS * script.SEQ
    layer = 2 * 12 * script.HIDDEN**2 * tokens + 4 * tokens * script.SEQ * script.HIDDEN
    assert (
        script.LAYERS * layer >= again["recomputed_flops"] > 0.6 * script.LAYERS * layer
    )  # unneeded operators are not recomputed


def test_an_operator_has_its_reads_its_writes_and_its_line(operators: OperatorsRecorded, script: Any):
    tokens, hidden = script.ROWS * script.SEQ, script.HIDDEN
    ups = [at for at in _of(operators, "aten.mm") if operators.modules[operators.module[at]].endswith("layers.1.up")]
    first = ups[0]
    assert operators.flops[first] == 2 * tokens * hidden * 4 * hidden
    assert operators.read_bytes[first] == 4 * (tokens * hidden + 4 * hidden * hidden)
    assert operators.written_bytes[first] == 4 * tokens * 4 * hidden
    assert operators.lines[operators.line[first]] == _line("self.down(functional.gelu")
    embedding = _of(operators, "aten.embedding.default")[0]
    assert operators.written_bytes[embedding] == 4 * tokens * hidden
    assert operators.read_bytes[embedding] == 4 * tokens * hidden + 8 * tokens
    step = _of(operators, "aten._fused_adamw_")
    parameters = script.LAYERS * 12 * hidden**2 + 2 * script.VOCAB * hidden
    assert sum(operators.written_bytes[at] for at in step) == pytest.approx(4 * 4 * parameters, rel=0.01)


def test_collectives_have_their_group_and_streams_their_waits(operators: OperatorsRecorded, script: Any):
    reduced = _of(operators, "c10d.allreduce_")
    parameters = script.LAYERS * 12 * script.HIDDEN**2 + 2 * script.VOCAB * script.HIDDEN
    assert sum(operators.written_bytes[at] for at in reduced) == 4 * parameters
    assert {operators.groups[operators.other[at] - 1] for at in reduced} == {(0, 1)}
    waits = _of(operators, "wait for a stream")
    doubled = [at for at in _of(operators, "aten.mul.Tensor") if operators.stream[at] != 0]
    assert len(waits) == 1
    assert operators.stream[waits[0]] == operators.stream[doubled[0]] != operators.other[waits[0]] == 0
    recorded, awaited = _of(operators, "record an event")[0], _of(operators, "wait for an event")[0]
    assert (operators.stream[recorded], operators.stream[awaited]) == (operators.stream[doubled[0]], 0)
    assert operators.other[recorded] == operators.other[awaited] > 0


def test_verbose_prints_the_flops_of_the_step(folder: Path, operators: OperatorsRecorded):
    shown = dry_run("--show", "run.gz", "-v", folder=folder, flags=())
    assert "Operators of the last step:" in shown.output
    assert f"{sum(operators.flops) / 10**6:,.2f} MFLOP" in " ".join(shown.output.split())


def _line(code: str) -> str:
    lines = _SCRIPT.read_text().splitlines()
    return f"{_SCRIPT.name}:{1 + next(at for at, line in enumerate(lines) if code in line)}"


def test_addmm_with_a_dtype_is_counted_like_addmm():
    """TRL's chunked losses call ``addmm`` with a dtype."""
    from zeroplan.dryrun.operators import flops

    left, right, added = (torch.empty(shape, device="meta") for shape in ((4, 8), (8, 16), (4, 16)))
    product = torch.ops.aten.addmm.dtype
    assert flops(product, (added, left, right, torch.float32), {}, added) == 2 * 4 * 8 * 16
