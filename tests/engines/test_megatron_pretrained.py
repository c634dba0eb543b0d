"""BERT and T5 under engine megatron, compared with what Megatron-Core 0.16.1's models allocate under ``zeroplan dryrun``.

``tests/dryrun/scripts/megatron_pretrained.py`` is the script that gave these figures.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from zeroplan import estimate, job
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate
from zeroplan.ledger import Kind
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import MegatronOptions, RecipeSpec
from zeroplan.transformer.megatron import cost_of
from zeroplan.units import KIB, MIB

#: Allocated tensors at the peak, which is in the loss. [MiB]
BERT_ON_2, T5_ON_4, T5_ON_1 = 2807.4328, 1636.5784, 5742.3867


def asked(script: str, tp: int, pp: int = 1, *, local: bool = True, **options: object) -> JobSpec:
    """Return a job with a model of the script and micro-batches of four sequences."""
    hidden, layers = (1024, 12 * pp) if script == "bert" else (768, 12)
    model = ModelSpec(
        family="gpt2", hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, head_dim=64, vocab_size=29184, positions=512, tie_word_embeddings=True,
    )  # fmt: skip
    said = MegatronOptions(
        pretrains=script, encoder_seq_length=512 if script == "t5" else None,
        transformer_impl="local" if local else "transformer_engine", gradient_accumulation_fusion=False, **options,
    )  # fmt: skip
    recipe = RecipeSpec(engine="megatron", zero_stage=0, attention="eager", megatron=said)
    batch = BatchSpec(micro_batch_size=4, seq_len=512 if script == "bert" else 128, grad_accum_steps=2)
    return JobSpec(model=model, recipe=recipe, mesh=MeshSpec(dp_shard=2, tp=tp, pp=pp), batch=batch)


def in_loss(answer: Estimate, *, without: str = "cuBLAS") -> float:
    """Return the memory in the loss, without cuBLAS's workspaces and the lines that start with ``without``. [MiB]"""
    lines = next(moment.lines for moment in answer.moments if moment.name == "loss")
    return sum(line.n_bytes for line in lines if not line.reason.startswith(("cuBLAS", without))) / MIB


@pytest.mark.parametrize(("tp", "allocated"), [(4, T5_ON_4), (1, T5_ON_1)])
def test_t5_takes_what_megatron_s_own_takes(tp: int, allocated: float) -> None:
    """This covers the encoder, the decoder with its cross attention, and the head."""
    assert in_loss(estimate(asked("t5", tp))) == pytest.approx(allocated, abs=32 * KIB / MIB)


def test_bert_takes_what_megatron_s_own_takes() -> None:
    """This is the second of two stages. The script runs no schedule, so no hidden states are left over."""
    answer = estimate(asked("bert", 2, 2), pipeline_rank=1)
    assert in_loss(answer, without="hidden states and gradients that the schedule") == pytest.approx(
        BERT_ON_2, abs=64 * KIB / MIB
    )


def test_parameters_are_megatron_s_own() -> None:
    """Torch counted the parameters of BERT's last stage of two, and of T5 on one rank."""
    bert, t5 = estimate(asked("bert", 2, 2), pipeline_rank=1), estimate(asked("t5", 1))
    weights = [next(line.n_bytes for line in one.states if line.kind is Kind.PARAMETERS) // 2 for one in (bert, t5)]
    assert weights == [92_676_354, 221_314_560]


JOBS = {
    "bert": asked("bert", 2, 2, local=False), "bert, local": asked("bert", 2), "bert, no binary head": asked(
        "bert", 1, bert_binary_head=False
    ),
    "t5": asked("t5", 2, local=False), "t5, local": asked("t5", 2), "t5, a shallow encoder": asked("t5", 1, encoder_num_layers=3),
}  # fmt: skip


@pytest.mark.parametrize("name", list(JOBS))
def test_every_line_is_explained(name: str) -> None:
    """Every line has a source and a formula, and no symbol has two meanings."""
    answer = estimate(JOBS[name])
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)


def test_the_mask_of_padding_is_kept_by_transformer_engine_alone() -> None:
    """Its unfused attention fills padding with zeros after the softmax. Megatron's kernel only reads the mask."""
    kept = []
    for one in (asked("bert", 2), asked("bert", 2, local=False)):
        lines = cost_of(one, "dense").kept
        kept.append({line.reason: line.n_bytes for line in lines})
    assert "mask of padding" not in kept[0]
    assert kept[1]["mask of padding"] == 4 * 512 * 512


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mesh": MeshSpec(pp=2)}, "pp=2"), ({"model": job(model="llama-2-7b").model}, "family 'llama'"),
        ({"recompute": "full"}, "recompute 'full'"), ({"attention": "sdpa"}, "attention 'sdpa'"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(change: dict[str, object], said: str) -> None:
    """The refusal names the option."""
    one = asked("t5", 1, local=False)
    with pytest.raises(SpecError, match=said):
        replace(one, **change) if "mesh" in change or "model" in change else replace(one, recipe=replace(one.recipe, **change))
