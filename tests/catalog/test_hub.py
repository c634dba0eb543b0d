"""A name that the catalogue does not know is asked for on the Hub: a stand-in of it on this machine."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.resolve import Request, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNKNOWN = r"unknown model 'mine/{}';.*"
TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 256}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does to what its client asks for a file (huggingface_hub, ``get_hf_file_metadata``)."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
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
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    constants = pytest.importorskip("huggingface_hub.constants")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", here)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.filterwarnings("ignore")
def test_a_shape_comes_from_the_hub_and_from_what_is_kept_of_it(hub: ThreadingHTTPServer):
    found = resolve(Request(model="mine/good")).job.model
    assert (found.hidden_size, found.name) == (64, "mine/good")
    with pytest.raises(UnknownNameError, match=UNKNOWN.format("absent") + "the Hub gave no config.json either: .*404"):
        resolve(Request(model="mine/absent"))
    with pytest.raises(SpecError, match=r"mine/bad on the Hub: .*num_hidden_layers"):
        resolve(Request(model="mine/bad"))
    hub.shutdown()
    hub.server_close()
    assert resolve(Request(model="mine/good")).job.model.num_hidden_layers == 2
    with pytest.raises(UnknownNameError, match=UNKNOWN.format("other") + "it cannot be reached, and nothing is cached"):
        resolve(Request(model="mine/other"))


def test_without_the_hubs_client_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownNameError, match=UNKNOWN.format("name") + "pip install huggingface_hub"):
        resolve(Request(model="mine/name"))
    with pytest.raises(UnknownNameError, match=r"unknown model 'no-owner'; .*lists all"):
        resolve(Request(model="no-owner"))
