"""The page in a real browser: what it shows is what the command line says, by mouse, by keyboard, on a phone."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.explore.test_answers import printed

uvicorn = pytest.importorskip("uvicorn")
sync_api = pytest.importorskip("playwright.sync_api")
ANSWERED = "#answer[aria-busy=false]"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from zeroplan.explore.server import explore_app

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(explore_app(), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if "422" not in message.text else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((address, "data:")) else wrong.append(request.url))
    page.goto(address)
    page.wait_for_selector(ANSWERED)
    yield page
    page.close()
    assert not wrong


def moved(page: Page, **values: str) -> None:
    """Set controls as a person does, and wait for the answer to the last."""
    for name, value in values.items():
        if name == "stage":
            page.check(f"#c-stage-{value}", force=True)
        elif page.evaluate(f"document.getElementById('c-{name}').tagName") == "SELECT":
            page.select_option(f"#c-{name}", value)
        else:
            page.fill(f"#c-{name}", value)
    page.wait_for_selector(ANSWERED)


def test_thirty_states_show_what_the_command_line_says(page: Page):
    chance = random.Random(7)  # noqa: S311  a sample, not a secret
    for _ in range(30):
        moved(
            page,
            model=chance.choice(["gpt2", "llama-3.2-1b", "qwen3-4b", "mixtral-8x7b", "7e9"]),
            stage=str(chance.randrange(4)),
            gpus=str(2 ** chance.randrange(1, 9)),
            seq_len=str(2 ** chance.randrange(7, 11)),
            recompute=chance.choice(["none", "full"]),
        )
        assert page.is_hidden("#error"), page.text_content("#error")
        told = printed(page.text_content("#command") or "")
        peak = told["peak"]["allocated_bytes"]  # type: ignore[index]
        shown = page.text_content("#figure-peak") or ""
        figures = [f"{peak / unit:.2f}" for unit in ((1e9, 2**30) if peak >= 1e8 else (1e6, 2**20))]
        assert all(figure in shown for figure in figures), (shown, peak)
        assert page.text_content("#figure-moment") == told["peak"]["moment"]  # type: ignore[index]


def test_every_control_moves_the_answer_or_is_refused_in_words(page: Page):
    names = page.evaluate("state.controls.map((one) => [one.name, one.kind, one.choices])")
    for name, kind, choices in names:
        if kind == "number":
            page.fill(f"#c-{name}", "2")
        elif name == "stage":
            page.check("#c-stage-2", force=True)
        elif kind == "choice":
            page.select_option(f"#c-{name}", choices[-1])
        page.wait_for_timeout(200)
        assert page.is_hidden("#error") or page.text_content("#error")


def test_the_address_brings_the_state_back(page: Page, address: str):
    moved(page, model="gpt2", gpus="16", stage="1", seq_len="256")
    shown = page.text_content("#figure-peak")
    page.goto("about:blank")
    page.goto(address + "#" + page.evaluate("''") + "model=gpt2&gpus=16&stage=1&seq_len=256")
    page.wait_for_selector(ANSWERED)
    assert page.text_content("#figure-peak") == shown


def test_the_keyboard_reaches_everything(page: Page):
    page.focus("#c-stage-3")
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(300)
    assert page.is_checked("#c-stage-2")
    assert "stage 2" in (page.text_content("#headline") or "")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, button')]"
        ".filter((one) => !one.labels?.length && !one.ariaLabel && !one.textContent).map((one) => one.id)"
    )
    assert unnamed == []


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_sticks_out(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_is_no_job_is_said_and_the_last_answer_fades(page: Page):
    moved(page, model="nobody")
    assert "unknown model" in (page.text_content("#error") or "")
    assert page.evaluate("document.getElementById('answer').classList.contains('stale')")
    json.dumps(page.evaluate("location.hash"))
