"""The message about a rank that NCCL aborted; an interrupt while processes are being stopped is obeyed. Needs no torch."""

import signal
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.measured_twins import twin
from zeroplan.errors import MeasurementError
from zeroplan.measurement import Measurement
from zeroplan.verify.processes import launch
from zeroplan.verify.processes.launch import Listener, Message, Started, listen
from zeroplan.verify.record import write_record
from zeroplan.verify.task import Task

TASK = Task(job=twin().job, transport="nccl", tensors="cuda", timeout_s=5.0)
WATCHDOG = (
    "[rank2]:[E1120 ProcessGroupNCCL.cpp:683] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, "
    "OpType=_ALLGATHER_BASE, NumelIn=1, NumelOut=4, Timeout(ms)=5000) ran for 5021 milliseconds before timing out.\n"
    "what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception\n"
)


def told(folder: Path, *messages: Message) -> Started:
    """Return ranks that have sent these messages."""
    queue: SimpleQueue[Message | None] = SimpleQueue()
    for message in messages:
        queue.put(message)
    return Started(None, queue, folder)  # type: ignore[arg-type]  # no process is asked


def test_a_rank_that_nccls_watchdog_aborts_is_named_with_its_collective_and_earlier_records_are_kept(tmp_path: Path):
    (tmp_path / "rank2.stderr").write_text(WATCHDOG)
    kept: list[Measurement] = []
    record = {"rank": "0", "record": str(write_record(twin(), tmp_path))}
    with pytest.raises(MeasurementError) as lost:
        listen(TASK, told(tmp_path, record, {"rank": "2", "died": "killed by SIGABRT"}), Listener(kept.append, lambda _: None))
    assert str(lost.value) == (
        "rank 2 died (killed by SIGABRT; NCCL: a collective (_ALLGATHER_BASE) timed out: at least one rank never called it) before "
        "it left a record; the other ranks were ended"
    )
    assert kept == [twin()]


def test_the_line_about_a_failed_rank_is_nccls_message(tmp_path: Path):
    said = "NCCL 2.28.9: unhandled system error: socketConnect: no route; set NCCL_DEBUG=INFO for details"
    with pytest.raises(MeasurementError, match=rf"^rank 1 failed: {said}$"):
        listen(TASK, told(tmp_path, {"rank": "1", "failed": "engine", "text": said}), Listener(lambda _: None, lambda _: None))


def test_an_interrupt_while_a_process_is_stopped_is_raised_afterwards(monkeypatch: pytest.MonkeyPatch):
    """The process ignores SIGTERM and interrupts its parent. It is still killed; then the interrupt is raised."""
    monkeypatch.setattr(launch, "_GRACE_S", 2.0)
    stubborn = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))\n"
        "print(flush=True)\nwhile True: time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               start_new_session=True)  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job may ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            launch.end_session(process)
        assert process.returncode == -signal.SIGKILL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
