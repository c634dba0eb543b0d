"""The page in a real browser: what it shows is what the command line says, by mouse, by keyboard, on a phone."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.explore.test_answers import printed

uvicorn = pytest.importorskip("uvicorn")
sync_api = pytest.importorskip("playwright.sync_api")
UNNAMED = (
    "[...document.querySelectorAll('input, select, button')]"
    ".filter((one) => !one.labels?.length && !one.ariaLabel && !one.textContent).map((one) => one.id)"
)
ANSWERED = "#answer[aria-busy=false]"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine, and none is fetched")

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
            page.focus(f"#c-{name}-slide")
            page.keyboard.press("ArrowRight")
            assert int(page.input_value(f"#c-{name}")) > 2, name
            page.keyboard.press("ArrowLeft")
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
    assert page.evaluate(UNNAMED) == []


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_sticks_out(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 800})
    planned(page)
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def planned(page: Page, batch: str = "64") -> None:
    """Ask for layouts by keyboard, and wait for them."""
    page.fill("#p-batch", batch)
    page.press("#p-batch", "Enter")
    page.wait_for_selector("#p-find:enabled", timeout=60_000)
    page.wait_for_selector("#layouts li")


def test_a_plan_is_the_command_lines_and_its_layouts_can_be_loaded(page: Page):
    moved(page, model="llama-3.2-1b", gpus="4", seq_len="2048", stage="0")
    planned(page)
    told = printed(page.text_content("#plan-command code") or "")
    layouts = [told["best"], *told["rivals"]]  # type: ignore[misc]
    shown = page.locator("#layouts li").all_text_contents()
    assert len(shown) == len(layouts) > 1
    for text, layout in zip(shown, layouts, strict=True):
        figures = (
            layout["layout"],
            f"{layout['least_bytes'] / 1e9:.2f} GB",
            f"{round(layout['tokens_per_s_per_gpu']):,} tokens/s",
        )
        assert all(figure in text for figure in figures), (text, figures)
    assert f"{told['considered']:,} layouts" in (page.text_content("#plan-said") or "")
    page.locator("#layouts button").nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    page.wait_for_selector(ANSWERED)
    answer = printed(page.text_content("#command") or "")
    peak = answer["peak"]["allocated_bytes"]  # type: ignore[index]
    assert f"{peak / 1e9:.2f} GB" in (page.text_content("#figure-peak") or "")
    taken = layouts[1]["least_bytes"] - peak
    assert 0 < taken < 3e9  # the context and NCCL, which a plan counts in
    assert page.input_value("#c-micro_batch") == str(layouts[1]["micro_batch"])
    assert not page.locator("#layouts.stale").count()
    moved(page, gpus="8")
    assert page.locator("#layouts.stale").count()
    assert page.evaluate(UNNAMED) == []


def test_what_cannot_be_planned_is_said(page: Page):
    page.fill("#p-batch", "many")
    page.click("#p-find")
    page.get_by_text("global batch 'many' is not a number").wait_for()
    assert page.locator("#layouts li").count() == 0
    moved(page, model="llama-3.1-405b", gpus="1", gpu="l4-24gb")
    planned(page, batch="")
    assert "nothing fits" in (page.text_content("#plan-said") or "")


def test_layouts_for_a_file_are_loaded_with_it(page: Page):
    moved(page, model="llama-3.2-1b", gpus="4", seq_len="2048", stage="0")
    page.select_option("#p-file", "accelerate")
    planned(page)
    page.locator("#layouts button").first.click()
    page.wait_for_timeout(300)
    page.wait_for_selector(ANSWERED)
    assert page.get_by_role("button", name="Download accelerate.yaml").count() == 1
    assert page.input_value("#c-keep_logits") == "fp32"


def test_a_configuration_is_handed_out_as_emit_writes_it(page: Page):
    moved(page, model="llama-3.2-1b", engine="deepspeed", stage="3")
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download ds_config.json").first.click()
    config = json.loads(Path(coming.value.path()).read_text())
    assert coming.value.suggested_filename == "ds_config.json"
    assert config["zero_optimization"]["stage"] == 3
    assert "its engine is deepspeed" in (page.text_content("#files") or "")


def test_a_report_hands_out_too_and_plans_nothing(browser: Any, tmp_path: Path):
    from zeroplan.explore.report import report_html
    from zeroplan.resolve import Request, resolve

    path, page = tmp_path / "report.html", browser.new_page()
    path.write_text(report_html(resolve(Request(model="gpt2", gpus=2)), "zeroplan estimate"))
    page.goto(path.as_uri())
    page.wait_for_selector(ANSWERED)
    assert page.is_hidden("#plan")
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download train_fsdp2.py").click()
    compile(Path(coming.value.path()).read_text(), "train_fsdp2.py", "exec")
    page.close()


def test_what_is_no_job_is_said_and_the_last_answer_fades(page: Page):
    moved(page, model="nobody")
    assert "unknown model" in (page.text_content("#error") or "")
    assert page.evaluate("document.getElementById('answer').classList.contains('stale')")
    json.dumps(page.evaluate("location.hash"))
