"""A pass that goes over equal blocks in one go notes the same as one that walks through all of them."""

import pytest

from zeroplan import job
from zeroplan.engines.deepspeed.notes import _Replay
from zeroplan.engines.deepspeed.stage3.job import pass_of
from zeroplan.engines.precisions import widths
from zeroplan.engines.rows import row_as_held
from zeroplan.spec.recipe import DeepSpeedOptions

OPTIONS = {
    "defaults": DeepSpeedOptions(),
    "short reach": DeepSpeedOptions(stage3_prefetch_bucket_size=10**7, stage3_max_reuse_distance=10**8),
    "far reach": DeepSpeedOptions(stage3_max_reuse_distance=10**11, stage3_param_persistence_threshold=0),
    "far prefetch": DeepSpeedOptions(stage3_prefetch_bucket_size=10**10, stage3_max_live_parameters=2 * 10**10),
    "no prefetch": DeepSpeedOptions(stage3_prefetch_bucket_size=0),
    "torch's linear": DeepSpeedOptions(memory_efficient_linear=False),
    "few live": DeepSpeedOptions(stage3_max_live_parameters=3 * 10**8, stage3_param_persistence_threshold=10**6),
    "few persistent": DeepSpeedOptions(stage3_model_persistence_threshold=2 * 10**5),
    "second partitions": DeepSpeedOptions(zero_hpz_partition_size=8),
    "second partitions, far reach": DeepSpeedOptions(zero_hpz_partition_size=8, stage3_max_reuse_distance=10**10),
}
MODELS = ("deepseek-v3", "gemma-3-27b", "llama-3.1-8b", "llama-4-maverick", "nemotron-nano-9b-v2", "qwen3-30b-a3b")
PASSES = {
    "a later one": {},
    "the first one": {"recording": True, "resident": False},
    "of several": {"resident": False},
    "a step's second": {"resident": False, "later": True},
    "forwards alone": {"last_forward": True},
}


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_a_pass_over_equal_blocks_in_one_go_notes_the_same(model: str, recompute: str, options: str, kind: str) -> None:
    recipe = job(model=model, gpus=64, engine="deepspeed", stage=3, recompute=recompute).recipe
    whole = row_as_held(job(model=model).model, widths(recipe.precision).compute)
    one = pass_of(whole, recipe, 64)._replace(options=OPTIONS[options])
    quick, slow = (_Replay(one, **PASSES[kind]) for _ in range(2))  # type: ignore[arg-type]
    slow.repeats = False
    assert quick.run().is_like(slow.run())
    _assert_same_end(quick, slow)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_a_pass_with_earlier_decisions_goes_over_equal_blocks_too(model: str, recompute: str, options: str) -> None:
    recipe = job(model=model, gpus=64, engine="deepspeed", stage=3, recompute=recompute).recipe
    whole = row_as_held(job(model=model).model, widths(recipe.precision).compute)
    one = pass_of(whole, recipe, 64)._replace(options=OPTIONS[options])
    first, slow_first = (_Replay(one, resident=False) for _ in range(2))
    slow_first.repeats = False
    first.decide()
    slow_first.decide()
    _assert_same_end(first, slow_first)
    quick, slow = (_Replay(one, decided=first.decided, later=True) for _ in range(2))
    slow.repeats = False
    assert quick.run().is_like(slow.run())
    _assert_same_end(quick, slow)


def _assert_same_end(quick: _Replay, slow: _Replay) -> None:
    assert quick.decided == slow.decided
    assert sorted(quick.memory.alive.values()) == sorted(slow.memory.alive.values())
    assert (quick.counted, quick.available, quick.second) == (slow.counted, slow.available, slow.second)


@pytest.mark.parametrize("kind", ["a later one", "the first one", "a step's second"])
@pytest.mark.parametrize("options", ["defaults", "second partitions"])
def test_most_steps_of_a_deep_model_are_not_walked_through(options: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = row_as_held(job(model="deepseek-v3").model, 2)
    inputs = pass_of(whole, job(model="deepseek-v3", gpus=64, engine="deepspeed", stage=3).recipe, 64)
    one = _Replay(inputs._replace(options=OPTIONS[options]), **PASSES[kind])  # type: ignore[arg-type]
    begun = list[int]()
    begin = one.begin

    def noted(at: int) -> None:
        begun.append(at)
        begin(at)

    monkeypatch.setattr(one, "begin", noted)
    one.run()
    assert len(begun) < len(one.steps) / 3
