"""Downloads from the Hub happen only for names of the Hub. A local server replaces the Hub."""

from __future__ import annotations

import json
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from tests.cli.command import running
from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.explore.answers import answer_payload
from zeroplan.explore.planning import planned_payload
from zeroplan.job_file import read_job_file
from zeroplan.resolve import Request, job, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNKNOWN = r"unknown model 'mine/{}';.*"
TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 256}  # fmt: skip


#: What the stand-in was asked for.
ASKED: list[str] = []


class Hub(BaseHTTPRequestHandler):
    """Answers requests for a file as the Hub does (huggingface_hub, ``get_hf_file_metadata``)."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        ASKED.append(self.path)
        text = json.dumps(TINY | {"num_hidden_layers": 2 if "good" in self.path else -1}).encode()
        if "absent" in self.path:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            text = b""
        else:
            self.send_response(200)
            self.send_header("X-Repo-Commit", "1" * 40)
            self.send_header("ETag", '"2"')
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if with_body:
            self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def stand_in(monkeypatch: pytest.MonkeyPatch, here: str, cache: Path) -> None:
    """Direct the Hub's client to an address of this machine."""
    constants = pytest.importorskip("huggingface_hub.constants")
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", here)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    stand_in(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path)
    ASKED.clear()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.filterwarnings("ignore")
def test_a_shape_comes_from_the_hub_and_from_what_is_kept_of_it(hub: ThreadingHTTPServer):
    good = job(model="hf:mine/good").model
    assert (good.hidden_size, good.name) == (64, "mine/good")
    assert job(model="https://huggingface.co/mine/good").model == good
    with pytest.raises(UnknownNameError, match=UNKNOWN.format("absent") + "the Hub gave no config.json either: .*404"):
        job(model="hf:mine/absent")
    with pytest.raises(SpecError, match=r"mine/bad on the Hub: .*num_hidden_layers"):
        job(model="hf:mine/bad")
    hub.shutdown()
    hub.server_close()
    assert job(model="hf:mine/good").model.num_hidden_layers == 2
    with pytest.raises(
        UnknownNameError, match=UNKNOWN.format("other") + "it cannot be reached within 20 s, and nothing is kept"
    ):
        job(model="hf:mine/other")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("hub")
def test_the_command_line_asks_by_name_and_says_how(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run = running(capsys)
    code, out, err = run("estimate", "--model", "mine/good")
    assert (code, out) == (2, "")
    assert err.endswith("; --model hf:mine/good on the command line fetches it from the Hugging Face Hub\n")
    assert ASKED == []
    code, out, _ = run("plan", "--model", "hf:mine/good", "--gpu", "l4-24gb", "--gpus", "2", "--seq-len", "128", "--json")
    assert (code, "zeroplan estimate --model hf:mine/good " in out, ASKED != []) == (0, True, True)
    trainer = tmp_path / "args.json"
    trainer.write_text(json.dumps({"model_name_or_path": "mine/good", "per_device_train_batch_size": 1, "output_dir": "x"}))
    code, _, err = run("estimate", "--from", trainer, "--model", "hf:mine/good", "--gpus", "2")
    assert (code, "replaces it" in err) == (0, False)
    assert run("estimate", "--model", tmp_path)[2].endswith("there is a file or folder of this name, which goes to --config\n")


def asks_nobody(tmp_path: Path, name: str) -> None:
    """Return requests by page, file and library that name a model of the Hub."""
    for answered in (answer_payload, planned_payload):
        with pytest.raises(UnknownNameError, match=r"--model hf:mine/good on the command line"):
            answered({"model": name, "gpus": "2", "gpu": "l4-24gb"})
    file = tmp_path / "job.toml"
    file.write_text(f"model = {json.dumps(name)}\ngpus = 2\n")
    with pytest.raises(UnknownNameError):
        resolve(read_job_file(file))
    (tmp_path / "args.json").write_text(json.dumps({"model_name_or_path": name, "output_dir": "x"}))
    with pytest.raises(UnknownNameError):
        resolve(Request(from_file=str(tmp_path / "args.json"), gpus=2))


@pytest.mark.parametrize("name", ["mine/good", "hf:mine/good", "https://huggingface.co/mine/good"])
@pytest.mark.usefixtures("hub")
def test_neither_the_page_nor_a_file_has_anything_fetched(tmp_path: Path, name: str):
    asks_nobody(tmp_path, name)
    assert ASKED == []


def test_the_page_does_not_tell_which_files_there_are(tmp_path: Path):
    (tmp_path / "there").touch()
    said = []
    for name in ("there", "away"):
        with pytest.raises(UnknownNameError) as unknown:
            answer_payload({"model": str(tmp_path / name)})
        said.append(str(unknown.value).replace(name, ""))
    assert said[0] == said[1]


@pytest.mark.filterwarnings("ignore")
def test_a_hub_that_stalls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The server accepts connections and never answers; the client alone would retry for minutes."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("zeroplan.catalog.hub._ALL_S", 1.0)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as stalls:
        stand_in(monkeypatch, f"http://127.0.0.1:{stalls.getsockname()[1]}", tmp_path)
        stalls.settimeout(0)
        asks_nobody(tmp_path, "hf:mine/good")
        with pytest.raises(BlockingIOError):
            stalls.accept()
        began = time.monotonic()
        with pytest.raises(UnknownNameError, match="it cannot be reached within"):
            job(model="hf:mine/good")
        assert time.monotonic() - began < 60  # on a busy machine; it is 240 s without the limit
        stalls.accept()[0].close()  # this time there was a question


def test_without_the_hubs_client_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownNameError, match=UNKNOWN.format("name") + "pip install huggingface_hub"):
        job(model="hf:mine/name")
    with pytest.raises(UnknownNameError, match=r"unknown model 'no-owner'; .*--config takes its config.json$"):
        resolve(Request(model="no-owner"))
    with pytest.raises(UnknownNameError, match=r"unknown model 'no-owner'; .*--config takes its config.json$"):
        job(model="hf:no-owner")
