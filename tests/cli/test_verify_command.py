"""``zeroplan verify``, which runs the engine: with real processes over gloo, with torch's fake group, and with failures."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.cli.command import Run, running
from tests.simulated import on_the_fake_gpu
from zeroplan.ledger import Phase
from zeroplan.measurement import Measurement
from zeroplan.records import read_record
from zeroplan.verify.replaced import replaced
from zeroplan.verify.task import Task

ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip
WORKLOADS = """
import os, signal, time
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 96)) for _ in range(3))

    def forward(self, x):
        x = self.first(x.to(self.first.weight.dtype))
        for layer in self.layers:
            x = x + layer(x)
        return x.float().pow(2).mean()


def good():
    torch.manual_seed(0)
    return Net(), {"x": torch.randn(16, 64)}, lambda output: output


def on_rank_one(act):
    module, batch, loss = good()

    def wrong(output):
        if os.environ["RANK"] == "1":
            act()
        return loss(output)

    return module, batch, wrong


def dies():
    return on_rank_one(lambda: os._exit(7))


def is_killed():
    return on_rank_one(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs():
    return on_rank_one(lambda: time.sleep(600))


def sleeps():
    time.sleep(600)


def refuses_to_end():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def raises():
    raise ZeroDivisionError("of my own making")


def raises_in_forward():
    module, batch, loss = good()
    return module, {"x": torch.randn(16, 63)}, loss


def returns_nothing():
    return None


def exits():
    raise SystemExit(0)


def reads_values():
    module, batch, loss = good()
    return module, batch, lambda output: output if float(output) > 0 else -output


OUTSIDE = torch.ones(64)


def mixes():
    module, batch, loss = good()
    return module, batch, lambda output: output * OUTSIDE.sum()


MADE = good()


def made_before():
    return MADE


not_a_function = 1
"""
needs_torch = [pytest.mark.torch, pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")]
pytestmark = needs_torch


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the current folder, with workloads and a config; afterwards check that no process is left."""
    (tmp_path / "work.py").write_text(WORKLOADS)
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "needy.py").write_text("import absent_package")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("work", "broken", "needy"):
        sys.modules.pop(name, None)
    assert not left_over(tmp_path)


def left_over(folder: Path) -> list[str]:
    """Return the command lines of running verify processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "zeroplan.verify." in line and str(folder) in line:
            found.append(line)
    return found


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return running(capfd, "verify", "--config", "tiny", "--seq-len", "64")


@contextlib.contextmanager
def written_to(errors: Path) -> Iterator[None]:
    """Send standard error to a file, as for a rank in its own process: Python's, and that of torch's C++ code."""
    before = os.dup(2)
    with errors.open("w") as sink, contextlib.redirect_stderr(sink):
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def _done(path: list[str], folder: str, task: Task) -> Measurement | dict[str, str]:
    """Run the task in the process with the fake GPU, with this test's modules; forget them afterwards.

    Other tests have modules of the same names.
    """
    with replaced(sys, "path", path), contextlib.chdir(folder):
        found = _done_here(task)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(folder):
            del sys.modules[name]
    return found


def _done_here(task: Task) -> Measurement | dict[str, str]:
    """Return the rank's record, or who caused the failure and the text of the error."""
    from zeroplan.verify.failures import cause_of, text_of
    from zeroplan.verify.processes.rank import measure

    try:
        return measure(task, rank=0, say=lambda _: None)
    except (Exception, SystemExit) as error:  # noqa: BLE001  as in a process of its own
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # the test's own frame is not the user's code
        return {"failed": cause_of(error), "text": text_of(error)}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the one rank of a task in this process instead of a new one."""
    import torch.distributed as dist

    from zeroplan.verify.processes import launch

    def done_here(task: Task, *, keep: Callable[[Measurement], None], say: Callable[[str], None]) -> None:
        with written_to(Path("errors")), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            there = partial(on_the_fake_gpu, _done, sys.path, str(Path.cwd())) if task.tensors == "fake" else _done_here
            found = there(task)
        if isinstance(found, Measurement):
            return keep(found)
        failed = {"rank": "0", **found}
        raise launch._failure(failed, launch.Started(None, SimpleQueue(), Path()), say)  # no process that could be lost

    monkeypatch.setattr(launch, "launch", done_here)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


CPU = ("--backend", "cpu")
FOREVER_S = 300
"""An upper limit. What a test waits for comes much sooner, even on a busy machine."""


DEEPSPEED = [pytest.mark.deepspeed, pytest.mark.skipif(find_spec("deepspeed") is None, reason="no DeepSpeed")]


@pytest.mark.parametrize("engine", [
    ("--stage", "3", "--engine", "fsdp2"),
    ("--stage", "1", "--engine", "ddp"),
    pytest.param(("--stage", "2", "--engine", "deepspeed", "--set", "deepspeed.reduce_bucket_size=1e5"),
                 marks=DEEPSPEED),
])  # fmt: skip
def test_two_real_ranks_agree_with_the_estimate(run: Run, here: Path, engine: tuple[str, ...]):
    code, out, err = run(*CPU, "--gpus", "2", "--nproc", "2", *engine, "--out", "records", "--tolerance", "0.01")
    assert code == 0, (out, err)
    assert "It agrees within 1 %" in out
    records = sorted((here / "records").iterdir())
    assert [path.name for path in records] == [f"tiny-{engine[3]}-stage{engine[1]}-n2-rank{rank}-cpu.json" for rank in (0, 1)]
    measured = [read_record(path) for path in records]
    assert [(one.rank, one.process_group, len(one.steps)) for one in measured] == [(0, "gloo", 3), (1, "gloo", 3)]
    assert all(sum(phase.kinds.values()) == phase.peak_bytes for one in measured for step in one.steps for phase in step.phases)
    assert [phase.phase for phase in measured[0].steady.phases] == [Phase.FORWARD, Phase.BACKWARD, Phase.STEP]


@pytest.mark.parametrize(("workload", "said"), [
    ("dies", "rank 1 died (exit code 7)"), ("is_killed", "rank 1 died (killed by SIGKILL)"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_a_rank_that_dies_ends_the_run(run: Run, workload: str, said: str):
    """The error names the dead rank, although the other rank may report first that it cannot reach it."""
    began = time.monotonic()
    code, out, err = run(*CPU, "--gpus", "2", "--nproc", "2", "--stage", "3", "--workload", f"work:{workload}")
    assert (code, out) == (4, "")
    assert said in err.splitlines()[-1]
    assert time.monotonic() - began < FOREVER_S  # the default limit for a silent rank


@pytest.mark.usefixtures("here")
def test_a_rank_that_hangs_is_ended_after_the_timeout(run: Run):
    code, out, err = run(*CPU, "--gpus", "2", "--nproc", "2", "--stage", "3", "--workload", "work:hangs", "--timeout", "12")
    assert (code, out) == (4, "")
    assert "Timed out" in err
    assert err.splitlines()[-1].startswith("zeroplan: ")


@pytest.mark.usefixtures("here")
def test_a_silent_rank_that_ignores_sigterm_is_killed(run: Run):
    began = time.monotonic()
    code, out, err = run(
        *CPU, "--gpus", "2", "--rank", "1", "--stage", "3", "--workload", "work:refuses_to_end", "--timeout", "3"
    )
    assert (code, out) == (4, "")
    assert "no rank made progress for 3 s" in err
    assert time.monotonic() - began < FOREVER_S  # half as long as it sleeps


EITHER = pytest.mark.parametrize("backend", ["simulate", "cpu"])
ON_TWO = ("--gpus", "2", "--stage", "3", "--rank", "0")


@pytest.mark.parametrize(("backend", "workload", "code", "said"), [
    ("cpu", "work:raises", 4, "zeroplan: the workload raised on rank 0: ZeroDivisionError"),
    ("simulate", "needy:f", 2, "zeroplan: workload 'needy:f' cannot be imported: No module named 'absent_package'"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_an_error_in_a_ranks_own_process_is_reported(run: Run, backend: str, workload: str, code: int, said: str):
    found, out, err = run("--backend", backend, *ON_TWO, "--workload", workload)
    assert (found, out) == (code, "")
    assert err.splitlines()[-1].startswith(said)


@EITHER
@pytest.mark.parametrize(("workload", "said"), [
    ("work:raises", "ZeroDivisionError: of my own making"), ("work:raises_in_forward", "RuntimeError"),
    ("work:exits", "SystemExit: 0"), ("broken:f", "SyntaxError"),
])  # fmt: skip
@pytest.mark.usefixtures("here", "in_this_process")
def test_a_workload_that_raises_shows_its_own_traceback(run: Run, backend: str, workload: str, said: str):
    code, out, err = run("--backend", backend, *ON_TWO, "--workload", workload)
    assert (code, out) == (4, "")
    shown = err.split("--- the workload's own traceback (rank 0) ---\n")[1].split("--- end of the workload's traceback ---")[0]
    assert f'{workload.split(":", maxsplit=1)[0]}.py"' in shown
    assert said in shown
    assert "zeroplan/" not in shown
    assert err.splitlines()[-1].startswith("zeroplan: the workload raised on rank 0: ")
    assert said in err.splitlines()[-1]


@EITHER
@pytest.mark.parametrize("workload", [
    "absent.module:f", "needy:f", "work:absent", "work:not_a_function", "work", ".work:f", "work:returns_nothing",
])  # fmt: skip
@pytest.mark.usefixtures("here", "in_this_process")
def test_a_workload_that_cannot_be_imported_is_one_line(run: Run, backend: str, workload: str):
    code, out, err = run("--backend", backend, *ON_TWO, "--workload", workload)
    assert (code, out) == (2, "")
    assert [line for line in err.splitlines() if line != "simulating rank 0 of 2"] == err.splitlines()[-1:]
    assert err.splitlines()[-1].startswith(f"zeroplan: workload '{workload}'")


@pytest.mark.parametrize(("workload", "said"), [
    ("reads_values", "run it with --backend cpu"), ("mixes", "inside the function"), ("made_before", "inside the function"),
])  # fmt: skip
@pytest.mark.usefixtures("here", "in_this_process")
def test_an_error_of_fake_tensors_names_the_way_out(run: Run, workload: str, said: str):
    code, out, err = run(*ON_TWO, "--workload", f"work:{workload}")
    assert (code, out) == (4, "")
    assert err.splitlines()[-1].endswith(said)


@EITHER
@pytest.mark.usefixtures("here")
def test_a_workload_is_named_apart_from_the_estimated_job(run: Run, backend: str):
    code, out, _ = run("--backend", backend, *ON_TWO, "--workload", "work:good", "--out", "records")
    assert code == 3
    assert out.splitlines()[0] == "workload work:good, fsdp2 ZeRO stage 3, rank 0 of 2"
    assert "predicted: the job, tiny with the job's batch and sequence length" in " ".join(out.split())
    (record,) = Path("records").iterdir()
    assert record.name.startswith("work-good-fsdp2")
    assert read_record(record).workload == "work:good"


@pytest.mark.usefixtures("here", "in_this_process")
def test_a_workload_needs_the_same_memory_on_fake_and_real_tensors(run: Run):
    peaks = []
    for backend in ("simulate", "cpu"):
        _, out, _ = run("--backend", backend, *ON_TWO, "--workload", "work:good", "--steps", "3", "--json")
        steady = json.loads(out)["comparisons"][0]["measurement"]["steps"][-1]
        peaks.append({phase["phase"]: phase["peak_bytes"] for phase in steady["phases"]} | {"held": steady["held_bytes"]})
    # AdamW counts the steps of each tensor in a scalar, which is in host memory if there is a GPU. Its step makes 12 bytes more.
    tensors, beyond = 14, {Phase.STEP.value: 12}
    assert {what: peaks[1][what] - n_bytes for what, n_bytes in peaks[0].items()} == {
        what: 4 * tensors + beyond.get(what, 0) for what in peaks[0]
    }


def test_the_program_finds_a_workload_in_the_current_folder(here: Path):
    """An installed program does not have that folder on its path, unlike ``python -m``."""
    program = here / "bin" / "zeroplan"
    program.parent.mkdir()
    program.write_text(f"import sys\nsys.path.insert(1, {str(ROOT)!r})\nfrom zeroplan.cli.app import main\nmain()\n")
    arguments = ("verify", "--config", "tiny", "--seq-len", "64", *ON_TWO, "--workload", "work:good")
    done = subprocess.run([sys.executable, program, *arguments], cwd=here, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("workload work:good"), done.stderr


def started(here: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "zeroplan", "verify", "--config", "tiny", "--seq-len", "64", *arguments],
        cwd=here, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  a shell's background jobs ignore it
    )  # fmt: skip


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + FOREVER_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_every_process(here: Path, sign: signal.Signals):
    """SIGKILL gives the parent no chance to end its ranks; the other signals do."""
    process = started(
        here, *CPU, "--gpus", "2", "--nproc", "2", "--stage", "3", "--workload", "work:sleeps", "--out", "records"
    )
    assert until(lambda: len(left_over(here)) == 3)  # the agent and its two ranks
    process.send_signal(sign)
    process.communicate(timeout=FOREVER_S)
    assert process.returncode == (130 if sign is signal.SIGINT else -sign)
    assert until(lambda: not left_over(here))
    assert not (here / "records").exists()


def test_an_interrupt_ends_a_simulation_silently(here: Path):
    """The workload writes a file, so that the test knows when it runs."""
    (here / "work.py").write_text("import time\n\ndef waits():\n    open('waiting', 'w').close()\n    time.sleep(600)\n")
    process = started(here, *ON_TWO, "--workload", "work:waits", "--out", "records")
    assert until((here / "waiting").exists)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=FOREVER_S)  # half as long as it sleeps
    assert (process.returncode, out) == (130, "")
    # The second line is printed if starting takes seconds, as on a busy machine.
    assert err in ("simulating rank 0 of 2\n", "simulating rank 0 of 2\nrank 0: starting\n")
    assert not (here / "records").exists()


REFUSED = [
    (("--backend", "quantum"), 2, "--backend 'quantum' is none of"),
    ((*CPU, "--nproc", "3", "--gpus", "2"), 2, "--nproc 3 does not fit the job's 2 GPUs"),
    (("--nproc", "2", "--gpus", "2"), 2, "--nproc 2 and --slurm go with --backend cpu or cuda"),
    ((*CPU, "--nproc", "-1", "--gpus", "2"), 2, "--nproc '-1' is not a whole number from 1 to 10,000"),
    ((*CPU, "--rank", "2", "--gpus", "2"), 2, "--as-rank '2' is not a whole number from 0 to 1"),
    (("--partition", "gpu"), 2, "--partition needs --slurm"),
    (("--matrix", "one-140gb"), 2, "a job has no effect with --matrix"),
    ((*CPU, "--as-rank", "1", "--of", "2", "--gpus", "4"), 2, "--of 2 and --gpus 4 are two numbers of GPUs"),
    ((*CPU, "--steps", "0"), 2, "--steps"),
    ((*CPU, "--timeout", "soon"), 2, "--timeout 'soon'"),
    ((*CPU, "--tolerance", "7"), 2, "--tolerance '7'"),
    ((*CPU, "--gpus", "8", "--stage", "3", "--engine", "paper"), 2, "is a formula and cannot be run"),
    (("--gpus", "8", "--engine", "megatron"), 2, "Transformer Engine's layers run on CUDA alone"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), REFUSED)
@pytest.mark.usefixtures("here")
def test_wrong_flags_are_one_line(run: Run, arguments: tuple[str, ...], code: int, said: str):
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("package", "engine", "extra"), [
    ("torch", "fsdp2", "verify"), ("transformers", "fsdp2", "verify"), ("deepspeed", "deepspeed", "deepspeed"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_a_missing_package_is_named_with_its_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch, package: str, engine: str, extra: str
):
    monkeypatch.setattr("zeroplan.installation.find_spec", lambda name: None if name == package else object())
    code, out, err = run(*CPU, "--gpus", "2", "--stage", "3", "--engine", engine)
    assert (code, out) == (4, "")
    assert f"{package} is not installed" in err
    assert f'pip install ".[{extra}]" in a clone of zeroplan' in err


def test_records_of_ranks_that_finished_are_kept(here: Path):
    from tests.measured_twins import twin
    from zeroplan.errors import MeasurementError
    from zeroplan.spec.mesh import MeshSpec
    from zeroplan.verify.processes.launch import Listener, Started, listen
    from zeroplan.verify.record import write_record
    from zeroplan.verify.task import Task

    kept: list[Measurement] = []
    said: list[str] = []
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"], text=True)
    watchdog = (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1) ran for 9 ms"
    )
    (here / "rank1.stderr").write_text(f"what went wrong\n{watchdog}\n")
    messages: SimpleQueue[dict[str, str] | None] = SimpleQueue()
    messages.put({"rank": "0", "record": str(write_record(twin(), here))})
    messages.put(None)
    task = Task(job=replace(twin().job, mesh=MeshSpec(dp_shard=2)), transport="gloo")
    with pytest.raises(
        MeasurementError,
        match=r"the launcher of the ranks died \(exit code 9; NCCL: a collective \(ALLREDUCE\) timed out.*\) before rank 1 left",
    ):
        listen(task, Started(process, messages, here), Listener(kept.append, said.append))
    assert kept == [twin()]
    assert "what went wrong" in said[0]
