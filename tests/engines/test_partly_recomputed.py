"""Recomputation of only the first blocks: memory and time are between those of none and all; unmodelled cases are refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engines.columns import Columns
from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from zeroplan import SpecError, estimate, job
from zeroplan.catalog.model import model
from zeroplan.engines.positions import corners
from zeroplan.estimator import account_of, engine_module
from zeroplan.export.files import cannot_say
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Engine, RecipeSpec, Stage
from zeroplan.steptime import step_time
from zeroplan.transformer.recomputed import layout_by_recomputation, order_by_recomputation

ENGINES: list[tuple[Engine, Stage]] = [
    ("fsdp2", 3), ("fsdp2", 2), ("ddp", 0), ("ddp", 1), ("deepspeed", 0), ("deepspeed", 2), ("deepspeed", 3)
]  # fmt: skip
LAYERS = 32


def peak(engine: Engine, stage: Stage, recompute: str, layers: int | None, name: str = "llama-2-7b") -> int:
    asked = job(model=name, gpus=8, engine=engine, stage=stage, seq_len=4096, micro_batch=16, recompute=recompute,
                recompute_layers=layers)  # fmt: skip
    answer = estimate(asked)
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)
    return int(answer.peak_bytes)


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_more_blocks_take_less_memory(engine: Engine, stage: Stage):
    few, many, most = (peak(engine, stage, "full", layers) for layers in (8, 16, LAYERS))
    assert most == peak(engine, stage, "full", None)
    assert most < many < few < peak(engine, stage, "none", None)


@pytest.mark.parametrize("first", [1, 7, 40, 45])
def test_alternating_kinds_of_layers_keep_their_order_in_both_parts(first: int):
    gemma = model("gemma-2-27b")
    runs, order = layout_by_recomputation(gemma, first).runs, order_by_recomputation(gemma, first)
    assert [order.count(at) for at in range(len(runs))] == [run.layers for run in runs]
    assert [runs[at].plain for at in order] == [False] * first + [True] * (gemma.num_hidden_layers - first)
    assert {one.layer for one in corners(gemma, first)} >= {0, first - 1, first, gemma.num_hidden_layers - 1}


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_columns_are_their_points(engine: Engine, stage: Stage):
    recipe = RecipeSpec(engine=engine, zero_stage=stage, recompute="full", recompute_layers=5)
    points = [
        (MeshSpec(dp_shard=8), BatchSpec(micro_batch_size=3, seq_len=2048, grad_accum_steps=2)),
        (MeshSpec(dp_shard=4), BatchSpec(seq_len=512)),
    ]
    columns = Columns(points)
    llama, module = model("llama-3.2-1b"), engine_module(engine)
    grid = module.account(llama, recipe, columns, columns)
    for at, (mesh, batch) in enumerate(points):
        one = module.account(llama, recipe, mesh, batch)
        totals = [int(np.broadcast_to(moment.total_bytes, 2)[at]) for moment in grid.moments]
        assert max(totals) == max(moment.total_bytes for moment in one.moments)


def test_time_counts_what_is_recomputed():
    def repeated(layers: int | None) -> float:
        one = job(model="llama-2-7b", gpus=8, gpu="a100-sxm-80gb", recompute="full", recompute_layers=layers)
        time = step_time(account_of(one, one.batch), one.model, one.recipe, one.mesh, one.batch, one.cluster)
        return next(float(part.seconds) for part in time.parts if part.name == "recomputation")

    assert repeated(8) == pytest.approx(repeated(None) / 4)
    assert repeated(LAYERS) == repeated(None)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"recompute": "none"}, "nothing to do"),
        ({"recompute_layers": LAYERS + 1}, "more than the 32 layers"),
        ({"engine": "paper"}, "engine 'paper'"),
        ({"engine": "megatron", "stage": 1}, "engine 'megatron'"),
        ({"offload_activations": True}, "offload_activations"),
    ],
)
def test_what_is_not_modelled_is_refused(said: dict[str, object], why: str):
    with pytest.raises(SpecError, match=why):
        job(**{"model": "llama-2-7b", "gpus": 8, "stage": 3, "recompute": "full", "recompute_layers": 8, **said})


def test_accelerate_and_deepspeed_cannot_express_partial_recomputation():
    first = RecipeSpec(recompute="full", recompute_layers=8)
    assert "all blocks or none" in cannot_say(first, "accelerate")
    assert "all blocks" in cannot_say(
        RecipeSpec(engine="deepspeed", zero_stage=2, recompute="full", recompute_layers=8), "deepspeed"
    )
    assert not cannot_say(first, "fsdp2")
