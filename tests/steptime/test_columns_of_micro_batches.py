"""A column of micro-batches takes, for each size, what that size takes alone."""

import numpy as np
import pytest

from zeroplan import job
from zeroplan.estimator import account_of
from zeroplan.spec.batch import Columns
from zeroplan.steptime import step_time
from zeroplan.steptime.compute import _COLUMN

SIZES = np.arange(1, _COLUMN + 5)
JOBS = (
    ("llama-3.1-8b", "fsdp2", 8, "sdpa"),
    ("llama-3.1-8b", "megatron", 8, "flash"),
    ("mixtral-8x7b", "fsdp2", 64, "eager"),
    ("deepseek-v3", "deepspeed", 512, "sdpa"),
    ("qwen3-next-80b-a3b", "fsdp2", 64, "sdpa"),
    ("nemotron-nano-9b-v2", "ddp", 8, "sdpa"),
)


@pytest.mark.parametrize("mfu", [None, 0.4])
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
@pytest.mark.parametrize(("model", "engine", "gpus", "attention"), JOBS)
def test_a_column_takes_what_each_size_takes_alone(
    model: str, engine: str, gpus: int, attention: str, gpu: str, mfu: float | None
):
    one = job(model=model, gpu=gpu, gpus=gpus, engine=engine, attention=attention)

    def seconds(sizes: object) -> object:
        batch = Columns(sizes, 4096, 1)  # type: ignore[arg-type]  # an int or a column
        account = account_of(one, batch)
        return step_time(account, one.model, one.recipe, one.mesh, batch, one.cluster, mfu=mfu).seconds

    assert seconds(SIZES) == pytest.approx([seconds(int(size)) for size in SIZES], rel=1e-12)
