"""Without a server, a browser's Python with the standard library alone gives the server's answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.command import running
from tests.combined import every_case
from zeroplan.explore.questions import in_browser
from zeroplan.explore.site import PYODIDE, write_site

JOBS = (
    "model=llama-3.1-8b&gpu=h100-sxm-80gb&gpus=8&stage=3&seq_len=4096",
    "model=mixtral-8x7b&gpu=b200-180gb&gpus=64&stage=3&expert_parallel=8&recompute=full",
    "model=qwen2.5-7b&gpu=a100-sxm-80gb&gpus=8&stage=2&engine=deepspeed&offload_optimizer=cpu",
    "model=llama-3.1-8b&gpu=l4-24gb&gpus=1&stage=0&lora_rank=16&quantize=nf4&seq_len=1024",
    "model=7e9&gpu=h100-sxm-80gb&gpus=16&stage=1&engine=megatron&tensor_parallel=2&pipeline_parallel=2&grad_accum=8",
    "model=gpt2&gpus=8&gpus=9",
)
QUESTIONS = ("answer", "step", "changes", "scaling", "longest")
ADDRESSES = [f"/api/{what}?{job}" for job in (JOBS if every_case() else JOBS[1:5:3]) for what in QUESTIONS]
ADDRESSES.append(
    f"/api/message?{JOBS[0]}&message=CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.18 GiB of "
    "which 1.00 GiB is free. Of the allocated memory 70.10 GiB is allocated by PyTorch, and 1.05 GiB is reserved by PyTorch but "
    "unallocated."
)
#: What a browser's Python lacks, refused before zeroplan is imported.
STRIPPED = """
import json, sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "pydantic", "yaml", "typer", "rich", "fastapi", "matplotlib", "torch"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
sys.path.insert(0, sys.argv[1])
from zeroplan.explore.questions import in_browser
print(json.dumps([in_browser(address) for address in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    fake_pyodide = folder / "pyodide"
    fake_pyodide.mkdir()
    for name in PYODIDE:
        (fake_pyodide / name).write_text(name)
    write_site(folder / "made", fake_pyodide, force=False)
    return folder / "made"


def test_the_standard_library_alone_gives_the_same_answers(site: Path, tmp_path: Path):
    """It uses the site's archive, so that the test notices a missing part of the package."""
    with zipfile.ZipFile(next(site.glob("zeroplan-*.zip"))) as archive:
        archive.extractall(tmp_path)
    asked = json.dumps(["/api/controls", *ADDRESSES])
    done = subprocess.run(
        [sys.executable, "-c", STRIPPED, str(tmp_path)], input=asked, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert [tuple(answer) for answer in json.loads(done.stdout)] == [in_browser(one) for one in ("/api/controls", *ADDRESSES)]


def test_what_needs_numpy_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    def lacking(*_: object) -> tuple[int, bytes]:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr("zeroplan.explore.questions.answered", lacking)
    status, content = in_browser("/api/answer?model=gpt2")
    assert (status, "needs numpy" in content, "zeroplan explore" in content) == (422, True, True)


def test_the_first_answers_are_those_of_python(site: Path):
    first, more = (json.loads((site / name).read_text(encoding="utf-8")) for name in ("first.json", "more.json"))
    assert [address.partition("?")[0] for address in first] == ["/api/controls", "/api/answer"]
    assert len(more) == 5 * 4 - 1  # five questions under four stages; the message is the reader's
    assert all(in_browser(address) == (200, content) for address, content in first.items())


def test_nothing_of_the_page_lies_elsewhere(site: Path):
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="/' not in page
    assert 'src="/' not in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize(("words", "why"), [
    (["--out", "new"], "belong together"),
    (["--pyodide", "new"], "belong together"),
    (["run.gz", "--out", "new", "--pyodide", "new"], "belong together"),
    (["--out", "new", "--pyodide", "there"], "has no pyodide.mjs"),
])  # fmt: skip
def test_what_makes_no_site_is_refused(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    code, _, message = running(capsys)("explore", *words)
    assert code == 2
    assert why in message
    assert not Path("new").exists()


# --- Pyodide itself, where ZEROPLAN_PYODIDE names its unpacked npm package ----------------------------------------------------

UNPACKED = os.environ.get("ZEROPLAN_PYODIDE")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    assert UNPACKED is not None
    write_site(tmp_path / "made", Path(UNPACKED), force=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path / "made"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.mark.skipif(UNPACKED is None or CHROMIUM is None, reason="ZEROPLAN_PYODIDE names no folder, or there is no Chromium")
def test_a_browser_gives_the_servers_answers_and_asks_no_other_host(served: str):
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, wrong = browser.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith((served, "data:")) else wrong.append(request.url))
        page.goto(served)
        page.wait_for_selector("#answer[aria-busy=false]")
        asked = "async (addresses) => { const found = []; for (const one of addresses) { const told = await send(one);"
        found = page.evaluate(asked + " found.push([told.status, await told.text()]); } return found; }", ADDRESSES)
        with page.expect_download() as download:
            page.click("#save-report")
        assert "Made by zeroplan" in Path(download.value.path()).read_text(encoding="utf-8")
        browser.close()
    assert not wrong
    assert [tuple(answer) for answer in found] == [in_browser(one) for one in ADDRESSES]
