"""The page and the command line give the same answer, because the same functions compute it."""

from __future__ import annotations

import contextlib
import io
import json
import shlex

import pytest
from hypothesis import assume, given, settings

from tests.combined import every_case
from tests.explore.states import OWN, jobs, states
from zeroplan.cli.app import main
from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.explore.answers import (
    answer_of,
    answer_payload,
    changes_payload,
    command,
    controls_payload,
    resolved_of,
    scaling_payload,
    step_payload,
)
from zeroplan.explore.controls import controls
from zeroplan.report.series.scaling import scaling

SAID = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "gpus": "8", "stage": "3", "seq_len": "4096"}


def printed(command: str) -> dict[str, object]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*shlex.split(command)[1:], "--json"])
    told: dict[str, object] = json.loads(out.getvalue())
    return told


@settings(max_examples=100 if every_case() else 10, deadline=None)
@given(jobs())
def test_the_command_that_is_shown_prints_what_the_page_shows(said: dict[str, str]):
    try:
        shown = answer_payload(said)
    except ZeroplanError:
        assume(False)
    told = printed(str(shown["command"]))
    told["changes"] = []  # the page asks for them afterwards
    assert json.loads(json.dumps(shown["estimate"])) == told


@settings(max_examples=60, deadline=None)
@given(states())
def test_what_goes_not_together_is_refused_in_one_line(said: dict[str, str]):
    try:
        shown = answer_payload(said)
    except ZeroplanError as refused:
        assert "\n" not in str(refused)  # noqa: PT017  either way is right
    else:
        peak = shown["estimate"]["peak"]["allocated_bytes"]  # type: ignore[index]
        drawn = step_payload(said)["step"]
        assert max(drawn["totals"]) == pytest.approx(peak, rel=0.001)  # type: ignore[index]


def test_what_is_drawn_is_the_same_account():
    shown = answer_payload(SAID)
    own = shown["stages"]["columns"][3]  # type: ignore[index]
    assert sum(part["n_bytes"] for part in own["parts"]) == own["needed_bytes"]
    assert {part["what"] for part in own["parts"]} <= controls_payload()["colours"].keys()  # type: ignore[attr-defined]


def test_the_changes_come_where_it_does_not_fit():
    assert changes_payload(SAID)["changes"] == []
    (first, *_) = changes_payload({**SAID, "gpus": "1", "stage": "0"})["changes"]  # type: ignore[misc]
    assert first["flags"].startswith("--")


def test_the_command_leaves_out_what_goes_without_saying():
    assert command({**SAID, "precision": "bf16-mixed", "engine": "", "micro_batch": "2"}) == (
        "zeroplan estimate --model llama-3.1-8b --gpu h100-sxm-80gb --gpus 8 --stage 3 --seq-len 4096 --micro-batch 2"
    )
    assert command({"model": "7e9"}) == "zeroplan estimate --params 7e9"


@pytest.mark.parametrize(("said", "why"), [
    ({"model": "nobody"}, "unknown model"), ({"model": "gpt2", "gpus": "many"}, "many"), ({"colour": "red"}, "no control 'colour'"),
    ({"model": "gpt2", "stage": "7"}, "stage"), ({}, "Model is empty; choose one"),
    ({"model": "gpt2", "gpus": "6", "replicas": "4"}, "replicas"),
])  # fmt: skip
def test_no_job_is_one_line(said: dict[str, str], why: str):
    with pytest.raises(ZeroplanError, match=why) as refused:
        answer_payload(said)
    assert "\n" not in str(refused.value)


def test_every_control_begins_with_one_of_its_choices():
    for control in controls():
        if control.kind == "choice":
            assert control.default in control.choices, control.name
    answer_payload({control.name: control.default for control in controls()})


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(SpecError, match="Precision 'fp4' is not offered; choose one of bf16-mixed"):
        answer_payload({"model": "gpt2", "precision": "fp4"})
    with pytest.raises(ZeroplanError, match=r"unknown GPU 'h100-sxm'; nearest: .*h100-sxm-80gb.*; choose one from its list"):
        answer_payload({"model": "gpt2", "gpu": "h100-sxm"})


def test_the_speed_is_the_one_that_advise_says():
    shown = answer_payload(SAID)
    told = printed(str(shown["command"]).replace("estimate", "advise"))
    assert shown["speed"]["tokens_per_s_per_gpu"] == told["before"]["tokens_per_s_per_gpu"] > 0  # type: ignore[index]
    assert shown["speed"]["step_s"] == pytest.approx(4096 / told["before"]["tokens_per_s_per_gpu"])  # type: ignore[index]


@pytest.mark.parametrize(("moved", "why"), [({"gpu": ""}, "without a GPU"), ({"gpu": "t4-16gb"}, "does not multiply in bf16")])
def test_an_unknown_speed_is_not_invented(moved: dict[str, str], why: str):
    speed = answer_payload({**SAID, **moved})["speed"]
    assert speed.keys() == {"refusal"}  # type: ignore[attr-defined]
    assert why in speed["refusal"]  # type: ignore[index]


def test_the_page_names_its_control_where_no_gpu_is_chosen_and_a_report_the_flag():
    assert str(answer_payload({**SAID, "gpu": ""})["verdict"]).endswith("Choose yours under GPU.")
    assert "Check: --gpu NAME." in str(answer_of(resolved_of({**SAID, "gpu": ""}), "")["verdict"])


def test_the_content_of_a_config_json_is_a_model_and_the_command_has_it():
    said = {**SAID, "config": json.dumps(OWN)}  # and a name, which it takes the place of
    shown = answer_payload(said)
    assert shown["estimate"]["job"]["model"]["hidden_size"] == 2048  # type: ignore[index]
    told = printed(str(shown["command"]))
    assert told["peak"] == shown["estimate"]["peak"]  # type: ignore[index]


@pytest.mark.parametrize("content", ["/etc/passwd", "config.json", "[1]", "{", "{}", '{"model_type": 1}'])
def test_the_page_reads_no_file_for_a_model(content: str):
    with pytest.raises(SpecError, match=r"config\.json") as refused:
        answer_payload({**SAID, "config": content})
    assert "\n" not in str(refused.value)


def test_more_gpus_are_those_of_the_picture():
    told, drawn = scaling_payload(SAID), scaling(resolved_of(SAID).job)
    assert [line["fits"] for line in told["lines"]] == [line.fits_words for line in drawn.lines]  # type: ignore[attr-defined,index]
    assert told["own"]["needed_bytes"] == drawn.own.needed_bytes  # type: ignore[index]
