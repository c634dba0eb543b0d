"""``zeroplan explore`` listens only on the loopback, writes no files, and fails in one line if it cannot start."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.cli.command import Run
from zeroplan.cli import explore

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[int]:
    """Start the command in an empty folder, which is also its home, and yield its port."""
    environment = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    command = [sys.executable, "-m", "zeroplan", "explore", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as server:  # fmt: skip
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", server.stdout.readline())
        assert found is not None
        yield int(found[1])
        server.terminate()


CUT_OFF = 0


def status_of(port: int, path: str, headers: dict[str, str] | None = None) -> int:
    """Return the status of the answer, or CUT_OFF if the server closes the connection first."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        try:
            connection.request("GET", path, headers=headers or {})
            return connection.getresponse().status
        except ConnectionError:  # the server may close the connection while we still write
            return CUT_OFF


def test_it_listens_only_on_the_loopback_and_writes_no_files(served: int, tmp_path: Path):
    job = "model=gpt2&gpu=l4-24gb&gpus=2&seq_len=256"
    paths = ("/", "/api/controls", f"/api/answer?{job}", f"/api/changes?{job}", f"/api/plan?{job}")
    assert {path: status_of(served, path) for path in paths} == dict.fromkeys(paths, 200)
    assert status_of(served, "/", {"X-Long": "x" * 10_000}) == 431
    # The HTTP parser refuses it before zeroplan sees it. The client reads the refusal, or fails while it writes the rest.
    assert status_of(served, "/", {"X-Long": "x" * 4_000_000}) in {400, 431, CUT_OFF}
    assert list(tmp_path.iterdir()) == []
    listening = explore._listening(0)
    assert listening.getsockname()[0] == "127.0.0.1"
    listening.close()


def test_it_closes_idle_connections(monkeypatch: pytest.MonkeyPatch):
    import uvicorn

    from zeroplan.explore.connection import TimedConnection

    served: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **_: served.append(self.config))
    with explore._listening(0) as listening:
        explore._serve(listening, None)
    assert [config.http for config in served] == [TimedConnection]


def test_a_port_in_use_is_one_line(run: Run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = run("explore", "--port", str(taken.getsockname()[1]), "--no-browser")
    assert (code, out, len(err.splitlines())) == (4, "", 1)
    assert "cannot be used" in err
