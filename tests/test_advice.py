"""Advice on single changes: memory saved and time lost, GPUs without known rates, changes that do not apply."""

from dataclasses import replace

import pytest

from zeroplan import SpecError, job
from zeroplan.advice import Advised, advise
from zeroplan.spec.recipe import DeepSpeedOptions


def flags(found: Advised) -> list[str]:
    return [one.change.flags for one in found.changes]


def test_a_gpu_without_the_rate_is_advised_by_memory_alone():
    """A V100 has no bf16 rate, so the advice gives memory but no time."""
    said = {"model": "gpt2-xl", "precision": "bf16-mixed", "engine": "fsdp2", "stage": 3, "gpus": 4, "seq_len": 1024}
    found = advise(job(gpu="v100-sxm2-32gb", **said))
    assert found.tokens_per_s is None
    assert {(one.tokens_per_s, one.slower) for one in found.changes} == {(None, None)}
    assert "--recompute full" in flags(found)


def test_what_is_in_host_memory_already_is_not_taken_there_again():
    base = job(model="llama-3.1-8b", gpu="h100", gpus=8, engine="deepspeed", stage=3, seq_len=1024)
    away = replace(base, recipe=replace(base.recipe, deepspeed=DeepSpeedOptions(offload_optimizer="cpu")))
    both = "--offload-optimizer cpu --offload-param cpu"
    assert {"--offload-optimizer cpu", both} <= set(flags(advise(base)))
    assert "--offload-optimizer cpu" not in flags(advise(away))
    assert both in flags(advise(away))


def test_quantised_weights_are_advised_to_leave_where_that_is_modelled():
    said = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "stage": 3, "seq_len": 1024, "lora_rank": 8, "quantize": "nf4"}
    with_fsdp2, with_deepspeed = job(**said, engine="fsdp2"), job(**said, engine="deepspeed")
    assert [one for one in flags(advise(with_fsdp2)) if "offload-optimizer" in one]
    assert not [one for one in flags(advise(with_deepspeed)) if one.startswith("--offload")]
    with pytest.raises(SpecError, match=r"QLoRA\) and offload to host memory"):
        replace(with_deepspeed, recipe=replace(with_deepspeed.recipe, deepspeed=DeepSpeedOptions(offload_optimizer="cpu")))
