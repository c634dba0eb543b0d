"""Engine megatron with adapters: Megatron-Core's own matrices with mcore-bridge's adapters run, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.formulas import assert_explained
from tests.measured import megatron
from zeroplan import estimate, job
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.megatron.rank import rank_of
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, Line
from zeroplan.measurement import Measurement
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.megatron import layers_of

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def adapted(*, layers: int = 2, local: bool = True, **said: object) -> JobSpec:
    asked = {"engine": "megatron", "stage": 1, "lora_rank": 8, "lora_dropout": True, "micro_batch": 2, "seq_len": 512, **said}
    found = job(**asked, **({"attention": "eager"} if local else {}))
    impl = "local" if local else "transformer_engine"
    own = replace(
        found.recipe.megatron, transformer_impl=impl, moe_grouped_gemm=not local, create_attention_mask_in_dataloader=False
    )
    return replace(found, model=replace(found.model, num_hidden_layers=layers), recipe=replace(found.recipe, megatron=own))


@needs_megatron
@pytest.mark.torch
@pytest.mark.parametrize("said", [
    {"model": "llama-2-7b", "gpus": 2},
    {"model": "llama-2-7b", "gpus": 2, "grad_accum": 2},
    {"model": "llama-2-7b", "gpus": 2, "lora_dropout": False, "recompute": "full"},
    {"model": "llama-2-7b", "gpus": 4, "tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
    {"model": "qwen3-0.6b", "gpus": 4, "tensor_parallel": 2, "lora_targets": "attention"},
    {"model": "llama-2-7b", "gpus": 4, "modules_to_save": "embed_tokens,lm_head"},
    {"model": "qwen3-30b-a3b", "gpus": 4, "expert_parallel": 2},
    {"model": "mixtral-8x7b", "gpus": 4, "expert_parallel": 2, "recompute": "full", "grad_accum": 2},
])  # fmt: skip
def test_peaks_held_bytes_and_traffic_are_those_of_a_run(said: dict[str, object]) -> None:
    one = megatron.matrix.measured(adapted(**said), silent_after=300, rank=0)
    assert isinstance(one, Measurement), one
    beyond = compare_with_estimate(one).beyond(0.001)
    assert not beyond, [f"{row.what} {row.error:+.3%}" for row in beyond]


def _kept(one: JobSpec) -> tuple[Line, ...]:
    return layers_of(one, ("dense",)).kinds["dense"].kept


def _of(lines: tuple[Line, ...], kind: Kind) -> int:
    return sum(int(line.n_bytes) for line in lines if line.kind is kind)


@needs_megatron
@pytest.mark.torch
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("more", [{}, {"recompute": "full", "modules_to_save": "embed_tokens,lm_head"}])
def test_both_ends_of_a_pipeline_are_those_of_a_run(*, rank: int, more: dict[str, object]) -> None:
    split = {"gpus": 4, "pipeline_parallel": 2, "grad_accum": 4, "layers": 4}
    one = megatron.matrix.measured(adapted(model="llama-2-7b", **split, **more), silent_after=300, rank=rank)
    assert isinstance(one, Measurement), one
    beyond = compare_with_estimate(one).beyond(0.001)
    assert not beyond, [f"{row.what} {row.error:+.3%}" for row in beyond]


def test_only_adapters_have_gradients_and_states() -> None:
    """An adapter serves queries, keys and values together, and another one gate and up projection."""
    one = adapted(model="llama-2-7b", gpus=2, local=False)
    model, found = one.model, estimate(one)
    h, f = model.hidden_size, model.intermediate_size
    elements = 2 * 8 * ((h + 3 * h) + (h + h) + (h + 2 * f) + (f + h))
    assert rank_of(0, one).elements == elements
    assert _of(found.states, Kind.GRADIENTS) == 4 * elements
    assert _of(found.states, Kind.OPTIMIZER_STATE) == 12 * elements // 2
    whole = estimate(replace(one, model=replace(model, adapter=None)))
    assert _of(found.states, Kind.PARAMETERS) == _of(whole.states, Kind.PARAMETERS) + 2 * elements


def test_experts_adapters_are_shared_by_fewer_ranks() -> None:
    one = adapted(model="qwen3-30b-a3b", gpus=4, expert_parallel=2, local=False)
    moe, h = one.model.moe, one.model.hidden_size
    assert moe is not None
    each = (h + 2 * moe.moe_intermediate_size) + (moe.moe_intermediate_size + h)
    assert rank_of(0, one).experts == 2 * 8 * moe.num_experts // 2 * each
    assert_explained(estimate(one))


def test_transformer_engines_norms_keep_their_output_beside_the_adapters_copy() -> None:
    theirs, own = (_kept(adapted(model="llama-2-7b", gpus=2, local=local, recompute="none")) for local in (False, True))
    kept = [
        {line.reason for line in lines if line.reason.startswith("output of") and "norm" in line.reason}
        for lines in (theirs, own)
    ]
    assert kept == [{"output of attention's norm", "output of the MLP's norm"}, set()]


def test_a_frozen_table_has_no_gradient() -> None:
    names = [moment.name for moment in estimate(adapted(model="llama-2-7b", gpus=2)).moments]
    saved = estimate(adapted(model="llama-2-7b", gpus=2, modules_to_save="embed_tokens"))
    assert "backward of the embedding" not in names
    assert "backward of the embedding" in [moment.name for moment in saved.moments]


@pytest.mark.parametrize(("said", "why"), [
    ({"lora_targets": "q_proj,v_proj"}, "adapters of only some of q_proj, k_proj, v_proj, which it joins"),
    ({"model": "gpt2", "lora_targets": "all-linear"}, "adapters in a gpt2 model"),
    ({"model": "qwen3-30b-a3b", "lora_targets": "attention,gate"}, "adapters of gate is not modelled"),
    ({"quantize": "nf4"}, "adapters and quantize 'nf4'"),
    ({"stage": 3}, "adapters and Megatron-FSDP"),
    ({"model": "qwen3-0.6b", "modules_to_save": "embed_tokens"}, "modules that are trained whole in a tied model"),
    ({"optimizer": "muon"}, "adapters and optimizer 'muon'"),
])  # fmt: skip
def test_what_is_not_modelled_is_refused(said: dict[str, object], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        job(**{"model": "llama-2-7b", "engine": "megatron", "stage": 1, "gpus": 2, "lora_rank": 8, **said})


def test_a_layer_may_have_no_adapter_at_all() -> None:
    """Frozen matrices then keep nothing: adapters of attention leave the MLP's input to the activation."""
    both: ModelSpec
    both, attention = (adapted(model="llama-2-7b", gpus=2, lora_targets=name).model for name in ("all-linear", "attention"))
    assert both.adapter != attention.adapter
    lines = _kept(replace(adapted(model="llama-2-7b", gpus=2), model=attention))
    assert not any("matrix's adapter" in line.reason and "MLP" in line.reason for line in lines)
