"""How many function calls does an estimate take? Calls do not depend on how busy the machine is; 12,000 take about 1 ms.

Counted is a further estimate of a model: what depends neither on the batch nor on the recipe is cached by the first.
"""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from zeroplan import job
from zeroplan.estimator import engine_module

ENGINES = (("ddp", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3))
MODELS = (
    "deepseek-v3",
    "gemma-3-27b",
    "gpt-oss-120b",
    "granite-4.0-h-small",
    "kimi-linear-48b-a3b",
    "llama-3.1-405b",
    "llama-4-maverick",
    "minimax-text-01",
    "nemotron-nano-9b-v2",
    "qwen3-next-80b-a3b",
)
"""The deepest model, and models whose layers alternate."""
MOST = 12_000


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_an_account_takes_a_millisecond_at_any_depth(model: str, engine: str, stage: int) -> None:
    one = job(model=model, gpus=64, engine=engine, stage=stage)
    account = engine_module(one.recipe.engine).account
    account(one.model, one.recipe, one.mesh, one.batch)
    assert calls_of(lambda: account(one.model, one.recipe, one.mesh, one.batch)) < MOST


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
