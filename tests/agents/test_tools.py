"""Agents get the same figures as the command line, in a short answer, and one line for an invalid question."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.explore.test_answers import printed
from zeroplan import estimate, job
from zeroplan.agents.tools import TOOLS, called
from zeroplan.errors import ZeroplanError
from zeroplan.explore.answers import answer_payload
from zeroplan.resolve import OPTIONS

JOB = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "gpus": 8, "stage": 3, "seq_len": 4096}
SMALL = {"model": "gpt2", "gpu": "l4-24gb", "gpus": 2, "seq_len": 512}


def test_python_agents_command_line_and_web_page_give_the_same_peak():
    python = estimate(job(**JOB))  # type: ignore[arg-type]  # fields of a request
    agent = called("estimate", {"job": JOB})
    shown = printed(shlex.join(shlex.split(str(agent["command"]))))
    page = answer_payload({key: str(value) for key, value in JOB.items()})["estimate"]
    peaks = {
        python.peak_bytes,
        agent["peak_allocated_bytes"],
        called("check", {"job": JOB})["peak_allocated_bytes"],
        called("compare", {"before": SMALL, "after": JOB})["after"]["peak_allocated_bytes"],  # type: ignore[index]
        shown["peak"]["allocated_bytes"],  # type: ignore[index]
        page["peak"]["allocated_bytes"],  # type: ignore[index]
    }
    assert len(peaks) == 1
    assert agent["fits"] is python.fits is True


QUESTIONS = (
    ("does 8B fit 8 H100 under ZeRO-3", "check", {"job": JOB}, lambda told: told["fits"]),
    ("under DDP", "check", {"job": {**JOB, "stage": 0}}, lambda told: not told["fits"] and "too much" in told["verdict"]),
    ("on one L4", "check", {"job": {**JOB, "gpus": 1, "gpu": "l4-24gb", "stage": 0}}, lambda told: not told["fits"]),
    ("as QLoRA on one L4", "check",
     {"job": {**JOB, "gpus": 1, "gpu": "l4-24gb", "stage": 0, "seq_len": 1024, "lora_rank": 16, "quantize": "nf4"}},
     lambda told: told["fits"]),
    ("16 bytes per parameter", "estimate", {"job": {"params": "7e9", "gpus": 1, "engine": "paper", "stage": 0}},
     lambda told: sum(told["states_gib"].values()) == pytest.approx(16 * 7e9 / 2**30, rel=1e-3)),
    ("sharded over 64", "estimate", {"job": {"params": "7e9", "gpus": 64, "engine": "paper", "stage": 3}},
     lambda told: sum(told["states_gib"].values()) == pytest.approx(16 * 7e9 / 64 / 2**30, rel=1e-2)),
    ("when is the peak", "estimate", {"job": JOB}, lambda told: told["peak_moment"] == "backward of the loss"),
    ("what would make it fit", "estimate", {"job": {**JOB, "stage": 1}},
     lambda told: told["changes_that_would_make_it_fit"][0]["flags"] == "--stage 2 --engine fsdp2"),
    ("nothing to change where it fits", "estimate", {"job": JOB}, lambda told: told["changes_that_would_make_it_fit"] == []),
    ("what was assumed", "estimate", {"job": {**SMALL, "seq_len": None}},
     lambda told: any("1,024" in note for note in told["notes"])),
    ("why", "explain", {"job": JOB}, lambda told: told["lines"][0]["kind"] == "activations" and told["lines"][0]["formula"]),
    ("where in the code", "explain", {"job": JOB}, lambda told: all(line["source"] for line in told["lines"])),
    ("how many smaller ones", "explain", {"job": JOB}, lambda told: len(told["lines"]) <= 20),
    ("what does recomputation do", "compare", {"before": JOB, "after": {**JOB, "recompute": "full"}},
     lambda told: told["change_by_kind_gib"]["activations"] < -15 and told["peak_change_gib"] < 0),
    ("what does ZeRO-3 send", "compare", {"before": {**JOB, "stage": 2}, "after": JOB}, lambda told: told["sent_change_gib"] > 0),
    ("which setting", "compare", {"before": JOB, "after": {**JOB, "micro_batch": 2}},
     lambda told: told["settings"] == [{"name": "micro_batch", "before": "1", "after": "2"}]),
    ("how is Mixtral called", "models", {"search": "mixtral"},
     lambda told: "mixtral-8x7b" in {one["name"] for one in told["models"]}),
    ("how large is it", "models", {"search": "llama-3.1-8b"}, lambda told: told["models"][0]["parameters"] == 8030261248),
    ("how much has an H100", "gpus", {"search": "h100 sxm 80"},
     lambda told: told["gpus"][0]["memory_gib"] == pytest.approx(79.18, abs=0.01)),
    ("what should I run", "plan", {"job": {"model": "gpt2", "gpu": "l4-24gb", "gpus": 2, "seq_len": 512}, "global_batch": 8},
     lambda told: told["fits"] and told["best"]["command"].startswith("zeroplan estimate --model gpt2")),
)  # fmt: skip


@pytest.mark.parametrize(("tool", "arguments", "known"), [one[1:] for one in QUESTIONS], ids=[one[0] for one in QUESTIONS])
def test_twenty_questions_have_their_known_answers(tool: str, arguments: dict[str, object], known: object):
    told = called(tool, arguments)
    assert known(told), told  # type: ignore[operator]  # a predicate
    assert len(json.dumps(told)) < 8000  # the whole answer goes into the agent's context


@pytest.mark.parametrize(("tool", "arguments", "why"), [
    ("estimate", {}, "job is None; write an object"), ("estimate", {"job": "gpt2"}, "job is 'gpt2'; write an object"),
    ("estimate", {"job": {"model": "nobody"}}, "unknown model 'nobody'"),
    ("estimate", {"job": {"model": "hf:a/b"}}, "fetches nothing"),
    ("estimate", {"job": {"model": "gpt2", "colour": 1}}, "colour"), ("check", {"job": {"model": "gpt2"}}, "no GPU is named"),
    ("plan", {"job": {"model": "gpt2"}}, "add gpu to the job"), ("plan", {"job": SMALL, "objective": "fun"}, "none of throughput"),
    ("plan", {"job": SMALL, "global_batch": "many"}, "global_batch is 'many'"),
    ("models", {"colour": 1}, "models takes no 'colour'"),
    ("paint", {}, "there is no tool 'paint'"), ("compare", {"before": SMALL}, "after is None"),
])  # fmt: skip
def test_an_invalid_call_is_refused_in_one_line(tool: str, arguments: dict[str, object], why: str):
    with pytest.raises(ZeroplanError, match=why) as refused:
        called(tool, arguments)
    assert "\n" not in str(refused.value)


_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 10**9)
    | st.floats(allow_nan=True)
    | st.sampled_from(["", "gpt2", "7e9", "3", "hf:x/y", "\0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*OPTIONS, "set", "x"]), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["estimate", "check", "explain", "compare", "models", "gpus"]),
    st.dictionaries(st.sampled_from(["job", "before", "after", "search"]), _ANYTHING),
)
def test_any_arguments_get_an_answer_or_one_line(tool: str, arguments: dict[str, object]):
    try:
        json.dumps(called(tool, arguments))
    except ZeroplanError as refused:
        assert "\n" not in str(refused)  # noqa: PT017  an answer and a refusal are both right


def test_the_descriptions_of_the_tools_are_short():
    assert sum(len(json.dumps(tool.schema)) + len(tool.description) for tool in TOOLS) < 15_000
    (described,) = [tool.schema["properties"]["job"]["properties"] for tool in TOOLS if tool.name == "estimate"]  # type: ignore[index]
    assert set(described) == {name for name, one in OPTIONS.items() if one.help} | {"set"}
