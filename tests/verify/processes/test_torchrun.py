"""Ranks that torchrun starts: two nodes of one rank each, here two torchrun agents on one machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from zeroplan.cli.app import main
from zeroplan.records import read_record
from zeroplan.verify.processes.torchrun import main as as_a_program

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "job.toml").write_text('config = "config.json"\nstage = 3\nseq_len = 32\n')
    (tmp_path / "eight.toml").write_text('config = "config.json"\nstage = 3\ngpus = 8\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_two_nodes_under_torchrun(here: Path, capsys: pytest.CaptureFixture[str]):
    where = f"127.0.0.1:{free_port()}"
    said = {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"),
    }  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--local-addr", "127.0.0.1"]  # fmt: skip
    program = ["-m", "zeroplan.verify.worker", "job.toml", "--backend", "cpu", "--record-dir", "records", "--timeout", "120"]
    nodes = [
        subprocess.Popen([*launcher, *program], cwd=here, env=said, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    told = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    (printed,) = [out for out, _ in told if out]
    assert "It agrees within 2 %" in printed
    records = sorted((here / "records").iterdir())
    assert [(read_record(path).rank, read_record(path).process_group) for path in records] == [(0, "gloo"), (1, "gloo")]
    with pytest.raises(SystemExit):
        main(["compare", "records"])
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("arguments", "environment", "code", "said"), [
    (("job.toml",), {}, 4, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set: start this with torchrun"),
    (("eight.toml",), {"WORLD_SIZE": "2"}, 2, "job file 'eight.toml' is for 8 GPUs, and 2 ranks were started"),
    (("absent.toml",), {"WORLD_SIZE": "2"}, 2, "job file 'absent.toml' does not exist"),
    (("job.toml", "--backend", "cpu", "--timeout", "1"), {"WORLD_SIZE": "2"}, 4, "rank 0's node did not answer at 127.0.0.1:"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_each_problem_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...],
    environment: dict[str, str], code: int, said: str,
):  # fmt: skip
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    if environment:
        environment = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert as_a_program(arguments) == code
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"zeroplan: {said}")
