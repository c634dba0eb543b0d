"""Uses the page in a real browser by mouse, keyboard and on a phone: it shows what the command line prints."""

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

from tests.combined import every_case
from tests.explore.states import OWN
from tests.explore.test_answers import printed
from zeroplan import __version__
from zeroplan.report.series.opened import opened

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
    """Set controls as a person does, and wait for the last answer."""
    for name, value in values.items():
        if page.locator(f"#more #c-{name}").count():
            page.evaluate("document.getElementById('more').open = true")
        if name == "stage":
            page.check(f"#c-stage-{value}", force=True)
        elif page.evaluate(f"document.getElementById('c-{name}').tagName") == "SELECT":
            page.select_option(f"#c-{name}", value)
        else:
            page.fill(f"#c-{name}", value)
    page.wait_for_selector(ANSWERED)


def test_states_at_random_show_what_the_command_line_says(page: Page):
    chance = random.Random(7)  # noqa: S311  a sample, not a secret
    for _ in range(30 if every_case() else 8):
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
    page.click("#more summary")
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


def test_one_gpu_has_no_stage_until_one_is_chosen(page: Page):
    for gpus, stage in (("1", "0"), ("8", "3")):
        moved(page, gpus=gpus)
        assert page.is_checked(f"#c-stage-{stage}")
    moved(page, stage="2", gpus="1")
    assert page.is_checked("#c-stage-2")


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
    """Request layouts by keyboard, and wait for them."""
    page.fill("#p-batch", batch)
    page.press("#p-batch", "Enter")
    page.wait_for_selector("#p-find[aria-disabled=false]", timeout=60_000)
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


def test_every_layout_is_a_spot_and_a_ring_is_loaded_by_keyboard(page: Page):
    moved(page, model="llama-3.2-1b", gpus="4", seq_len="2048", stage="0")
    planned(page)
    front = page.evaluate("state.scattered.front")
    assert page.locator("#scatter .ring").count() == len(front) > 1
    at = next(at for at, one in enumerate(front) if one["said"])
    page.locator("#scatter .ring").nth(at).focus()
    assert front[at]["words"] in (page.text_content("#spot") or "")
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    page.wait_for_selector(ANSWERED)
    told = printed(page.text_content("#command") or "")
    assert 0 < front[at]["needed_bytes"] - told["peak"]["allocated_bytes"] < 3e9  # type: ignore[index]  # context and NCCL


def test_what_cannot_be_planned_is_said(page: Page):
    page.fill("#p-batch", "many")
    page.click("#p-find")
    page.get_by_text("Sequences of all GPUs per step 'many' is not a number").wait_for()
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
    assert page.get_by_role("button", name="Download accelerate-zeroplan.yaml").count() == 1
    assert page.input_value("#c-keep_logits") == "fp32"


def test_a_downloaded_configuration_is_what_emit_writes(page: Page):
    moved(page, model="llama-3.2-1b", engine="deepspeed", stage="3")
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download deepspeed-zeroplan.json").first.click()
    config = json.loads(Path(coming.value.path()).read_text())
    assert coming.value.suggested_filename == "deepspeed-zeroplan.json"
    assert config["zero_optimization"]["stage"] == 3
    assert "its engine is deepspeed" in (page.text_content("#files") or "")


def test_a_picture_and_a_report_are_saved_of_the_job_that_is_shown(page: Page):
    moved(page, model="llama-3.2-1b", gpus="4")
    for name, begins in (("save-stages", b"<?xml"), ("save-timeline", b"<?xml"), ("save-report", b"<!doctype html>")):
        with page.expect_download() as coming:
            page.click(f"#{name}")
        content = Path(coming.value.path()).read_bytes()
        assert content.startswith(begins)
        assert b"llama-3.2-1b" in content
        assert coming.value.suggested_filename == page.get_attribute(f"#{name}", "download")


def test_a_report_hands_out_too_moves_its_stage_and_plans_nothing(browser: Any, tmp_path: Path):
    from zeroplan.explore.report import report_html
    from zeroplan.resolve import Request, resolve

    path, page = tmp_path / "report.html", browser.new_page()
    path.write_text(report_html(resolve(Request(model="gpt2", gpus=2)), "zeroplan estimate"))
    page.goto(path.as_uri())
    page.wait_for_selector(ANSWERED)
    assert page.is_hidden("#plan")
    assert page.is_hidden("#save-report")
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download fsdp2-zeroplan.py").click()
    compile(Path(coming.value.path()).read_text(), "fsdp2-zeroplan.py", "exec")
    sharded = page.text_content("#figure-peak")
    page.check("#c-stage-0", force=True)
    assert page.text_content("#figure-peak") != sharded
    assert "stage 0: DDP" in (page.text_content("#headline") or "")
    assert "--stage 0" in (page.text_content("#command") or "")
    assert page.locator("#bar .piece").count() > 3
    assert f"zeroplan {__version__}, " in (page.text_content("#made") or "")
    page.close()


PHONE = {"width": 390, "height": 844}


def in_view(page: Page, selector: str) -> bool:
    """Whether a person sees it without scrolling."""
    box = page.locator(selector).bounding_box()
    return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"]  # type: ignore[index]


@pytest.mark.parametrize("size", [PHONE, {"width": 1440, "height": 900}], ids=["phone", "desk"])
def test_what_is_no_job_is_said_in_sight_and_no_verdict_is_left(page: Page, size: dict[str, int]):
    page.set_viewport_size(size)  # type: ignore[arg-type]
    assert page.locator(".fits:visible").count()
    for model, place in (("nobody", "top"), ("nobody else", "bottom")):
        page.fill("#c-model", model)
        page.evaluate(f"scrollTo(0, {0 if place == 'top' else 'document.body.scrollHeight'})")
        page.get_by_text(f"unknown model '{model}'").wait_for()
        assert in_view(page, "#error"), place
        assert page.locator("main.stale").count()
        assert not page.locator(".fits").count()
        assert "fits" not in (page.text_content("header") or "") + (page.text_content("#verdict") or "")
    moved(page, model="llama-3.2-1b")
    assert page.is_hidden("#error")
    assert page.locator("#verdict.fits").count() == 1


def stepped(page: Page) -> Any:
    """Wait for the picture of the step, and return its series."""
    page.wait_for_selector("#timeline[aria-busy=false] svg")
    return page.evaluate("state.step")


def alive(page: Page) -> list[float]:
    """Return the figures of the ledger's lines, and the sum that it shows. [GiB]"""
    return [float(text.replace(",", "")) for text in page.locator("#ledger tr td:nth-child(2)").all_text_contents()]


def test_the_scrubber_moves_the_ledger_by_mouse_keyboard_and_touch(page: Page):
    moved(page, model="llama-3.1-8b", gpus="8", seq_len="4096")
    told = stepped(page)
    assert page.text_content("#ledger-title") == "What is alive at the peak"
    assert "the peak" in (page.text_content("#moment") or "")
    page.focus("#scrub")
    page.keyboard.press("Home")
    assert f"{told['totals'][0] / 2**30:.2f} GiB" in (page.text_content("#moment") or "")
    assert page.text_content("#ledger-title") == "What is alive: forward, embedding"
    *lines, together = alive(page)
    assert sum(lines) == pytest.approx(together, abs=0.01 * len(lines))
    box = page.locator("#timeline").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 2)
    assert "Backward, layers." in (page.text_content("#moment") or "")
    page.click("#to-peak")
    assert page.text_content("#ledger-title") == "What is alive at the peak"


def test_a_change_of_stage_leaves_ghosts_of_what_went(page: Page):
    moved(page, model="llama-3.1-8b", gpus="8", seq_len="4096", stage="0")
    before = page.evaluate("state.told.stages.columns[0].parts.find((one) => one.what === 'optimizer state').n_bytes")
    moved(page, stage="1")
    page.wait_for_timeout(300)
    after = page.evaluate("state.told.stages.columns[1].parts.find((one) => one.what === 'optimizer state').n_bytes")
    assert page.locator("#bar .ghost").filter(has_text="optimizer state").text_content() == (
        f"\u2212{(before - after) / 2**30:.1f} GiB optimizer state"
    )
    gone = page.evaluate("document.querySelector('#bar [data-id=\"ghost-optimizer state\"]').getBoundingClientRect().width")
    there = page.evaluate("document.querySelector('#bar [data-id=\"piece-optimizer state\"]').getBoundingClientRect().width")
    assert gone / there == pytest.approx((before - after) / after, rel=0.05)


def test_a_fix_is_a_button_with_its_price(page: Page):
    moved(page, model="llama-3.1-8b", gpus="8", seq_len="8192", stage="2")
    button = page.get_by_role("button", name="recompute selectively")
    button.wait_for()
    assert "88.6 GiB → 55.1 GiB, 6 % slower" in (button.text_content() or "")
    button.click()
    page.wait_for_selector("#verdict.fits")
    assert page.input_value("#c-recompute") == "selective"
    assert page.is_hidden("#fixes")
    assert page.text_content("#changed") == "(1 changed)"


def test_a_click_on_a_column_chooses_its_stage(page: Page):
    page.locator("#stages .choose").first.click()
    page.wait_for_selector(ANSWERED)
    assert page.is_checked("#c-stage-0")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "step.json"
    printed(f"zeroplan estimate --model gpt2 --gpus 8 --stage 3 --seq-len 128 --trace {path}")
    return path


def test_a_file_is_opened_scrubbed_and_closed(page: Page, trace: Path):
    page.set_input_files("#file", trace)
    page.wait_for_selector("main.opened")
    assert page.inner_text("#verdict") == f"{opened(trace, 'step.json').headline}."
    assert page.is_hidden("#bar")
    page.focus("#scrub")
    page.keyboard.press("Home")
    assert page.inner_text("#ledger-title") == "What is alive: initialisation"
    page.click("#close")
    page.wait_for_selector("#bar")
    assert page.inner_text("#timeline-title") == "Over one step"
    page.locator("#ledger-title", has_text="What is alive at the peak").wait_for()


def test_a_config_json_is_the_model_until_another_is_named(page: Page, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**OWN, "id2label": {"0": "a" * 9000}}))
    page.set_input_files("#file", tmp_path / "config.json")
    page.locator("#headline", has_text="config.json on").wait_for()
    assert page.input_value("#c-model") == ""
    assert json.loads(page.input_value("#c-config")) == OWN
    page.fill("#c-model", "llama-3.2-1b")
    page.locator("#headline", has_text="llama-3.2-1b on").wait_for()
    assert page.input_value("#c-config") == ""


def test_a_broken_config_json_is_refused_as_one(page: Page, tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    page.set_input_files("#file", tmp_path / "config.json")
    page.locator("#error", has_text="is not JSON").wait_for()


def test_the_longest_sequence_that_fits_is_set_and_one_step_more_is_tight(page: Page):
    moved(page, model="llama-3.1-8b", gpus="8", seq_len="8192", stage="2")
    page.click("#longest")
    page.locator("#longest-said", has_text="Up to 5,504 tokens fit; tightly, up to 6,784").wait_for()
    page.locator("#verdict.fits", has_text="In a replay").wait_for()
    assert page.input_value("#c-seq_len") == "5504"
    moved(page, seq_len="6912")
    page.locator("#verdict.not").wait_for()


OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 79.18 GiB of which "
    "2.30 GiB is free. Including non-PyTorch memory, this process has 76.87 GiB memory in use. Of the allocated memory 74.50 GiB "
    "is allocated by PyTorch, and 1.05 GiB is reserved by PyTorch but unallocated."
)


def test_a_message_that_is_pasted_or_in_a_log_names_the_request_of_this_job_or_of_another(page: Page, tmp_path: Path):
    moved(page, model="llama-3.1-8b", gpus="8", seq_len="8192", stage="2")
    page.fill("#message", OUT_OF_MEMORY)
    page.click("#explain")
    page.locator("#why", has_text="would print this message").wait_for()
    moved(page, seq_len="4096")
    (tmp_path / "train.log").write_text(f"step 1\n{OUT_OF_MEMORY}\n")
    page.set_input_files("#file", tmp_path / "train.log")
    page.get_by_role("button", name="--seq-len 8192").click(timeout=90_000)
    page.wait_for_selector(ANSWERED)
    assert page.input_value("#c-seq_len") == "8192"


def test_a_point_on_more_gpus_loads_its_job(page: Page):
    page.wait_for_timeout(1000)
    page.locator("#plan").scroll_into_view_if_needed()
    page.wait_for_selector("#scaling .spot")
    last = page.locator("#scaling .spot").last
    told = last.locator("title").text_content()
    last.dispatch_event("click")
    page.locator("#headline", has_text="1,024 x").wait_for()
    assert (told or "").startswith("stage 3 on 1,024 GPUs: ")
    assert page.input_value("#c-gpus") == "1024"


def test_a_file_is_dropped_and_what_is_none_leaves_the_job(page: Page):
    before = page.inner_text("#verdict")
    dropped = page.evaluate_handle(
        "() => { const held = new DataTransfer(); held.items.add(new File(['x'], 'notes.txt')); return held; }"
    )
    for event in ("dragover", "drop"):
        page.dispatch_event("main", event, {"dataTransfer": dropped})
    page.wait_for_selector("#error:visible")
    assert page.inner_text("#error").startswith("file 'notes.txt' does not say what is alive over time")
    assert page.inner_text("#verdict") == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_moves_where_motion_is_unwanted(browser: Any, address: str, scheme: Any):
    page = browser.new_page(reduced_motion="reduce", color_scheme=scheme)
    page.goto(address)
    page.wait_for_selector(ANSWERED)
    assert page.evaluate("getComputedStyle(document.querySelector('#bar .piece')).transitionDuration") in ("0s", "all")
    page.close()


def test_skipping_to_the_answer_keeps_the_job(page: Page, address: str):
    moved(page, model="gpt2", gpus="16", seq_len="512")
    page.focus("#skip")
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    assert page.evaluate("document.activeElement.id") == "answer"
    assert (page.input_value("#c-model"), page.input_value("#c-gpus")) == ("gpt2", "16")
    assert "gpt2 on 16" in (page.text_content("#headline") or "")
    page.goto("about:blank")
    page.goto(f"{address}#answer")
    page.wait_for_selector(ANSWERED)
    assert page.is_hidden("#error")
    assert "model=llama-3.1-8b" in page.evaluate("location.hash")


def test_the_words_beside_the_stages_choose_none(page: Page):
    page.get_by_text("ZeRO stage", exact=True).click()
    page.wait_for_timeout(200)
    assert page.is_checked("#c-stage-3")
    assert page.get_by_role("radiogroup", name="ZeRO stage").count() == 1


@pytest.mark.parametrize("chart", ["stages", "timeline"])
def test_every_colour_of_a_chart_is_in_its_legend(page: Page, chart: str):
    for stage in ("0", "3"):
        moved(page, stage=stage)
        stepped(page)
        drawn = page.evaluate(
            f"[...document.querySelectorAll('#{chart} :is(rect, path)[fill]')].map((one) => one.getAttribute('fill'))"
        )
        named = page.evaluate(f"[...document.querySelectorAll('#{chart}-legend rect')].map((one) => one.getAttribute('fill'))")
        assert set(drawn) == set(named)
    assert chart == "stages" or "unsharded gradients" in page.locator(f"#{chart}-legend li").all_text_contents()


def test_back_undoes_one_move_after_the_other(page: Page):
    moved(page, stage="2")
    page.fill("#c-gpus", "")
    page.type("#c-gpus", "128", delay=100)
    page.keyboard.press("Tab")
    page.wait_for_selector(ANSWERED)
    assert "gpus=128" in page.evaluate("location.hash")
    page.go_back()
    page.wait_for_selector(ANSWERED)
    assert (page.input_value("#c-gpus"), page.is_checked("#c-stage-2")) == ("8", True)
    page.go_back()
    page.wait_for_selector(ANSWERED)
    assert page.is_checked("#c-stage-3")
    page.get_by_text("ZeRO stage 3").wait_for()
    page.go_forward()
    page.wait_for_selector(ANSWERED)
    assert page.is_checked("#c-stage-2")


@pytest.mark.parametrize(("link", "why"), [
    ("model=nobody", "unknown model 'nobody'"), ("model=gpt2&gpu=nonsense", "unknown GPU 'nonsense'"),
    ("model=gpt2&stage=7", "ZeRO stage '7' is not offered"), ("model=gpt2&colour=red", "no control 'colour'"),
    ("model=gpt2&gpus=many", "GPUs 'many'"),
])  # fmt: skip
def test_a_link_to_no_job_says_why(page: Page, address: str, link: str, why: str):
    page.goto("about:blank")
    page.goto(f"{address}#{link}")
    page.get_by_text(why).wait_for()
    assert "Loading" not in (page.text_content("body") or "")
    assert page.is_hidden("#ledger")
    moved(page, model="llama-3.2-1b", gpus="4", gpu="h100-sxm-80gb", stage="3")
    assert page.is_hidden("#error")
    assert page.is_visible("#ledger")


@pytest.mark.parametrize(("path", "answered"), [("/api/controls", False), ("/api/answer?*", False), ("/api/answer?*", True)])
def test_a_server_that_is_gone_or_broken_is_said(browser: Any, address: str, path: str, answered: bool):
    page = browser.new_page()
    page.route(f"**{path}", lambda route: route.fulfill(status=500, body="Internal") if answered else route.abort())
    page.goto(address)
    page.get_by_text("zeroplan itself failed" if answered else "does not answer").wait_for()
    assert "Loading" not in page.text_content("body")
    page.close()


def test_the_focus_stays_on_the_button_that_searches(page: Page):
    moved(page, model="gpt2", gpus="2", seq_len="256")
    page.focus("#p-find")
    page.keyboard.press("Enter")
    page.wait_for_selector("#layouts li", timeout=60_000)
    assert page.evaluate("document.activeElement.id") == "p-find"


def test_quantised_adapters_can_be_chosen_and_are_named(page: Page):
    moved(page, model="llama-3.1-8b", gpu="l4-24gb", gpus="1", seq_len="1024", stage="0", lora_rank="32", quantize="nf4")
    assert "llama-3.1-8b with QLoRA (nf4) of rank 32 on 1 x NVIDIA L4" in (page.text_content("#headline") or "")
    told = printed(page.text_content("#command") or "")
    assert told["job"]["model"]["adapter"]["quantize"] == "nf4"  # type: ignore[index]
    assert f"{told['peak']['allocated_bytes'] / 1e9:.2f} GB" in (page.text_content("#figure-peak") or "")  # type: ignore[index]


def test_the_speed_is_shown_without_a_plan(page: Page):
    moved(page, model="llama-3.1-8b", gpus="8")
    rate = printed((page.text_content("#command") or "").replace("estimate", "advise"))["before"]["tokens_per_s_per_gpu"]  # type: ignore[index]
    assert page.text_content("#figure-speed") == f"{round(rate):,} tokens/s per GPU"
    assert (page.text_content("#figure-step") or "").endswith(" s")
    moved(page, gpu="")
    assert page.text_content("#figure-speed") == "not known without a GPU"


def test_messages_name_the_controls_of_the_page(page: Page):
    moved(page, replicas="3")
    assert "\u201cGPUs\u201d 8 is not divisible by \u201cReplicas\u201d 3" in (page.text_content("#error") or "")
    moved(page, replicas="1", model="gpt2")
    assert "\u201cTokens per sequence\u201d=4,096 is beyond the 1,024 positions" in (page.text_content("#error") or "")
    moved(page, seq_len="512", set="fsdp2.colour=red")
    assert "\u201cOptions of the engine\u201d 'fsdp2.colour=red': fsdp2 has no option" in (page.text_content("#error") or "")
    moved(page, set="", gpu="")
    assert (page.text_content("#verdict") or "").endswith("Choose yours under GPU.")
