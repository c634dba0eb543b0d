"""Slurm jobs from submission to comparison, on a real Slurm that the tests start."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.command import Run, running
from tests.verify.processes.slurm_here import is_here, slurm
from zeroplan.cli.app import main

ROOT = Path(__file__).parents[3]
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512,
}  # fmt: skip
JOB = ("--config", "config.json", "--stage", "3", "--gpus", "2", "--seq-len", "32", "--backend", "cpu", "--slurm")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not is_here(), reason="Slurm (slurm-wlm, munge) is not installed, or this is not root"),
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("submitit", "torch", "transformers")
    ),
]


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    with slurm(folder) as path:
        yield path


@pytest.fixture
def here(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for name, said in (("SLURM_CONF", conf), ("PYTHONPATH", ROOT), ("GLOO_SOCKET_IFNAME", "lo"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, str(said))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return running(capfd, "verify")


@pytest.mark.parametrize(("arguments", "said"), [
    (("--partition", "absent"), "Slurm refuses the job: invalid partition specified: absent"),
    (("--partition", "closed"), "PartitionDown; it was cancelled"),
    (("--time-limit", "90"), "PartitionTimeLimit; it was cancelled"),
    (("--slurm-option", "constraint=gold"), "Slurm refuses the job: Invalid feature specification"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_a_refused_job_is_reported_in_slurms_own_words(run: Run, arguments: tuple[str, ...], said: str):
    code, out, err = run(*JOB, "--record-dir", "kept", *arguments)
    assert (code, out) == (4, "")
    assert err.splitlines()[-1].startswith("zeroplan: Slurm ")
    assert err.splitlines()[-1].endswith(said.removeprefix("Slurm "))
    assert all(line.startswith("Slurm job ") for line in err.splitlines()[:-1])
    assert not subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("here")
def test_a_node_that_is_down_is_not_waited_for(run: Run):
    node = subprocess.run(["sinfo", "--noheader", "--format=%n"], capture_output=True, text=True, check=True).stdout.split()[0]
    subprocess.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"], check=True)
    try:
        code, out, err = run(*JOB, "--record-dir", "kept")
    finally:
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=True)
    assert (code, out) == (4, "")
    assert "zeroplan: Slurm cannot start job" in err.splitlines()[-1]


def test_a_job_is_submitted_left_and_resumed(here: Path, run: Run, capfd: pytest.CaptureFixture[str]):
    waits = subprocess.Popen(
        [sys.executable, "-m", "zeroplan", "verify", *JOB, "--record-dir", "kept"], cwd=here, text=True, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  a shell's background jobs ignore it
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (here / "kept" / "slurm" / "job.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
    waits.send_signal(signal.SIGINT)
    _, err = waits.communicate(timeout=20)
    assert waits.returncode == 130
    assert "continues: `zeroplan verify --resume kept` reconnects" in err
    code, out, err = run("--resume", "kept")
    assert code == 0, err
    assert "It agrees within 2 %" in out
    assert "rank 1: peak" in out
    code, again, _ = run("--resume", "kept")  # also after the job has ended
    assert (code, again) == (0, out)
    with pytest.raises(SystemExit):
        main(["compare", "kept"])
    assert capfd.readouterr().out == out
    code, out, err = run(*JOB, "--record-dir", "kept")
    assert (code, out) == (2, "")
    assert "'kept' already has a Slurm job: continue it with --resume" in err


def test_a_rank_that_fails_ends_the_others_and_says_why(here: Path, run: Run):
    (here / "work.py").write_text(
        "import os\nfrom tests.verify.watching.ranks import _work\n\n\ndef bad():\n    made = _work()\n\n    def wrong(output):\n"
        "        if os.environ['RANK'] == '1':\n            raise ZeroDivisionError('of my own making')\n        return output\n\n"
        "    return made.module, made.batch, wrong\n"
    )
    code, out, err = run(*JOB, "--record-dir", "kept", "--workload", "work:bad")
    assert (code, out) == (4, "")
    assert err.splitlines()[-1].endswith("failed: ZeroDivisionError: of my own making")
