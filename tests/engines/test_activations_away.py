"""Estimates with activation offload: what leaves the GPU is in host memory, to the byte; the rest is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.formulas import assert_explained
from zeroplan import Estimate, SpecError, estimate, job
from zeroplan.ledger import Kind
from zeroplan.spec.recipe import Recompute
from zeroplan.units import GIB

INPUT = 2 * 4096 * 4096
LAYERS = 32


def answers(recompute: Recompute, **said: object) -> tuple[Estimate, Estimate]:
    asked = job(model="llama-2-7b", gpus=8, seq_len=4096, recompute=recompute, **said)
    return estimate(asked), estimate(replace(asked, recipe=replace(asked.recipe, offload_activations=True)))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_inputs_of_all_blocks_are_in_host_memory_instead(recompute: Recompute):
    here, away = answers(recompute)
    assert away.host_bytes == LAYERS * INPUT == GIB
    at_loss = [next(one for one in answer.moments if one.name == "loss, forward").total_bytes for answer in (here, away)]
    assert at_loss[0] - at_loss[1] == LAYERS * INPUT
    assert here.traffic.collectives == away.traffic.collectives


@pytest.mark.parametrize(("stage", "engine"), [(0, "ddp"), (0, "deepspeed"), (2, "deepspeed"), (3, "deepspeed")])
def test_other_engines_offload_the_same_inputs(stage: int, engine: str):
    _, away = answers("full", stage=stage, engine=engine, precision="bf16-mixed")
    residual = 2 if engine == "ddp" else 1  # DDP's autocast keeps block inputs in fp32
    assert sum(line.n_bytes for line in away.host if line.kind is Kind.ACTIVATIONS) == residual * LAYERS * INPUT


def test_without_recomputation_a_tensor_is_offloaded_once_for_each_operator_that_saves_it():
    """This includes weights, since matrix products save views of them, and both rotary tables, for queries and for keys."""
    answer = estimate(job(model="llama-2-7b", gpus=8, seq_len=4096, offload_activations=True))
    weights, tables = 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096), 4 * 2 * 4096 * 128
    hidden, wide = 2 * 4096 * 4096, 2 * 4096 * 11008
    norms = 2 * (2 * 2 * hidden + hidden + 3 * 4 * 4096 - 4 * 4096)
    attention = 3 * hidden + 4 * hidden + 4 * 4096 * 32 + hidden
    mlp = 2 * hidden + 4 * wide
    saved = next(line.n_bytes for line in answer.host if line.kind is Kind.ACTIVATIONS)
    assert saved == LAYERS * (weights + tables + norms + attention + mlp)
    assert not any("kept by the blocks" in line.reason and line.n_bytes for one in answer.moments for line in one.lines)


def test_each_pinned_tensor_is_rounded_up_separately():
    asked = job(model="llama-2-7b", gpus=8, seq_len=4000, recompute="full", offload_activations=True)
    tensors, beyond = (line.n_bytes for line in estimate(asked).host)
    assert (tensors, tensors + beyond) == (LAYERS * 2 * 4000 * 4096, GIB)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"model": "gpt-oss-20b"}, "recompute 'none' and a gpt_oss model"),
        ({"model": "bloom-560m"}, "a bloom model is not modelled"),
        ({"model": "llama-2-7b", "engine": "deepspeed", "stage": 3}, "DeepSpeed's own linear layers"),
        ({"model": "llama-2-7b", "lora_rank": 8, "quantize": "nf4"}, "quantised weights"),
        ({"model": "llama-2-7b", "context_parallel": 2}, "cp=2"),
        ({"model": "llama-2-7b", "recompute": "full", "engine": "paper"}, "engine 'paper'"),
        ({"model": "gpt2", "recompute": "full", "attention": "eager"}, "attention 'eager'"),
        (
            {"model": "llama-2-7b", "recompute": "full", "engine": "deepspeed", "offload_optimizer": "cpu"},
            "DeepSpeed's offload",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(said: dict[str, object], why: str):
    with pytest.raises(SpecError, match=why):
        estimate(job(gpus=8, offload_activations=True, **said))


@pytest.mark.parametrize(("recompute", "width"), [("full", 4096), ("none", 11008)])
@pytest.mark.parametrize(("engine", "residual"), [("fsdp2", 2), ("ddp", 4)])
def test_streams_keep_the_latest_saved_tensors_on_the_gpu(recompute: Recompute, width: int, engine: str, residual: int):
    """Five of them, as torchtune and TRL set ``max_fwd_stash_size``; without recomputation they may be as wide as an MLP."""
    stage = 3 if engine == "fsdp2" else 0
    asked = job(
        model="llama-2-7b", gpus=8, seq_len=4096, recompute=recompute, engine=engine, stage=stage, offload_activations=True
    )
    streams = replace(asked, recipe=replace(asked.recipe, inputs_in_flight=5))
    waited, moving = estimate(asked), estimate(streams)
    assert moving.peak.total_bytes - waited.peak.total_bytes == 5 * residual * 4096 * width
    assert_explained(moving)


def test_only_offloaded_tensors_are_in_flight():
    asked = job(model="llama-2-7b", gpus=8, seq_len=4096)
    with pytest.raises(SpecError, match="inputs_in_flight needs offload_activations"):
        replace(asked, recipe=replace(asked.recipe, inputs_in_flight=5))
