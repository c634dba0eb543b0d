"""Gradients are copied to the host during the backward only if there are several buckets."""

import pytest

from zeroplan import DeepSpeedOptions, estimate, job


@pytest.mark.parametrize(("elements", "on_the_way"), [(500_000_000, False), (5_000_000, True)])
def test_one_bucket_is_reduced_at_the_end(elements: int, on_the_way: bool) -> None:
    """Of GPT-2's 124 million parameters, all fit into the larger bucket and about a twenty-fifth into the smaller one."""
    options = DeepSpeedOptions(reduce_bucket_size=elements)
    asked = job(model="gpt2", gpus=4, stage=2, engine="deepspeed", offload_optimizer="cpu", deepspeed=options)
    names = [moment.name for moment in estimate(asked).moments]
    assert "end of backward: own gradients to the host" in names
    assert ("own gradients to the host during the backward" in names) == on_the_way
