"""How many function calls does an estimate take? Calls do not depend on how busy the machine is; 12,000 take about 1 ms.

Counted is a further estimate of a model: what depends neither on the batch nor on the recipe is cached by the first.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest

from zeroplan import estimate, job

ENGINES = (
    ("ddp", 0),
    ("deepspeed", 0),
    ("deepspeed", 1),
    ("deepspeed", 2),
    ("deepspeed", 3),
    ("fsdp1", 3),
    ("fsdp2", 3),
)
MODELS = (
    "deepseek-v3",
    "gemma-2-2b",
    "gemma-3-27b",
    "gemma-4-26b-a4b",
    "gemma-4-e2b",
    "gemma-4-e4b",
    "glm-5.2",
    "gpt-oss-120b",
    "granite-4.0-h-small",
    "kimi-linear-48b-a3b",
    "llama-3.1-405b",
    "llama-3.2-90b-vision",
    "llama-4-maverick",
    "minimax-text-01",
    "nemotron-nano-9b-v2",
    "qwen2.5-vl-72b",
    "qwen3-next-80b-a3b",
    "qwen3.5-9b",
)
"""The deepest model, models whose layers alternate, and those with most kinds of layers."""
REFUSED = {
    "gemma-4-e2b": ("fsdp1-3",),
    "gemma-4-e4b": ("fsdp1-3",),
    "glm-5.2": ("ddp-0", "deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3", "fsdp1-3"),
    "llama-3.2-90b-vision": ("deepspeed-3", "fsdp1-3"),
}
"""Engines and stages that zeroplan does not model for a model."""
CASES = [(model, *one) for model in MODELS for one in ENGINES if "{}-{}".format(*one) not in REFUSED.get(model, ())]
MOST = 12_000


@pytest.mark.parametrize(("model", "engine", "stage"), CASES)
def test_an_estimate_takes_a_millisecond(model: str, engine: str, stage: int) -> None:
    one = job(model=model, gpus=64, engine=engine, stage=stage)
    estimate(one)
    assert calls_of(lambda: estimate(one)) < MOST


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_its_calls_do_not_grow_with_the_layers(engine: str, stage: int) -> None:
    known = job(model="llama-3.1-8b", gpus=64, engine=engine, stage=stage)
    few, many = (replace(known, model=replace(known.model, num_hidden_layers=layers)) for layers in (32, 160))
    for one in (few, many):
        estimate(one)
    assert calls_of(lambda: estimate(many)) < 1.1 * calls_of(lambda: estimate(few))


def calls_of(run: Callable[[], object]) -> int:
    """Return the number of calls of Python's and of built-in functions."""
    calls, before = 0, sys.getprofile()

    def counted(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls
