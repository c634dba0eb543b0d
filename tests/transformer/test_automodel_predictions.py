"""Compares the formulas of NeMo AutoModel's multi-token prediction with its own model, run on a CPU.

``RUNS`` has the model's bytes at commit 36044ad3. If ``nemo_automodel`` is installed, the model runs again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.formulas import assert_explained
from tests.transformer.automodel_predictions import EXPERTS, SHAPE, SHARED, Run, run_predictions
from zeroplan.engines.fsdp2 import account
from zeroplan.engines.outside import recompute_of
from zeroplan.engines.precisions import compute_of
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind, Moment, Phase
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import LinearSpec, ModelSpec, MoeSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.params import layout
from zeroplan.verify.task import refuse_unrunnable


class Case(NamedTuple):
    depths: int
    repeats: bool
    tokens: int
    vocabulary: int


#: With a large vocabulary logits are most of the memory, with a small one blocks are.
RUNS = {
    Case(1, False, 128, 4096): Run(3724064, 10605142, 11959080),
    Case(2, False, 128, 4096): Run(4930624, 13909888, 15020908),
    Case(1, False, 512, 1024): Run(11700896, 17205334, 18245708),
    Case(2, True, 512, 1024): Run(16502464, 24108160, 25148532),
    Case(3, False, 256, 512): Run(10406368, 12376232, 12634264),
}


def _job(case: Case, **recipe: object) -> JobSpec:
    sizes = {name: size for name, size in SHAPE.items() if not name.startswith(("moe", "num_experts"))}
    experts = MoeSpec(
        num_experts=EXPERTS, num_experts_per_tok=SHAPE["num_experts_per_tok"],
        moe_intermediate_size=SHAPE["moe_intermediate_size"], num_shared_experts=SHARED // SHAPE["moe_intermediate_size"],
    )  # fmt: skip
    model = ModelSpec(
        family="nemotron_h", **sizes, vocab_size=case.vocabulary, num_hidden_layers=2 + 2 * case.depths, rotary=False,
        layer_pattern="*E" + "ae" * case.depths, predictions=case.depths, predictor_repeats=case.repeats, moe=experts,
        linear=LinearSpec(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8),
    )  # fmt: skip
    said = {"fused_kernels": "norm-in-one,grouped-experts,output-copied", "keep_logits": True, "precision": "bf16",
            "transformers": "5.12", **recipe}  # fmt: skip
    return JobSpec(
        model=model, mesh=MeshSpec(dp_shard=1), batch=BatchSpec(micro_batch_size=1, seq_len=case.tokens),
        recipe=RecipeSpec(engine="fsdp2", zero_stage=3, optimizer="sgd", **said),
    )  # fmt: skip


def _formulas(case: Case) -> Run:
    """Return the same moments of a job, without weights: those of FSDP2 are copies, which AutoModel's model has not here."""

    def size(moment: Moment) -> int:
        weights = (Kind.PARAMETERS, Kind.UNSHARDED_PARAMETERS, Kind.REDUCE, Kind.OPTIMIZER_STATE)
        return sum(int(line.n_bytes) for line in moment.lines if line.kind not in weights)

    job = _job(case)
    moments = account(job.model, job.recipe, job.mesh, job.batch).moments
    return Run(
        max(size(one) for one in moments if one.phase is Phase.FORWARD),
        max(size(one) for one in moments if one.of_forward),
        max(size(one) for one in moments if one.phase in (Phase.LOSS, Phase.BACKWARD) and not one.of_forward),
    )


@pytest.mark.parametrize("case", RUNS)
def test_the_formulas_have_at_least_the_models_bytes(case: Case):
    """The backward counts the losses of all depths until the last one's is done, and a gradient of the head more."""
    ours, theirs = _formulas(case), RUNS[case]
    assert theirs.forward <= ours.forward <= 1.05 * theirs.forward
    assert theirs.loss <= ours.loss <= 1.05 * theirs.loss
    assert theirs.backward <= ours.backward <= 1.35 * theirs.backward


@pytest.mark.parametrize("case", RUNS)
def test_the_model_still_has_these_bytes(case: Case):
    assert run_predictions(case.depths, repeats=case.repeats, tokens=case.tokens, vocabulary=case.vocabulary) == RUNS[case]


def test_predictions_of_several_ranks_explain_themselves():
    """Of a file's model, adapters and recomputation; blocks that run at several depths are not recomputed."""
    job = _job(Case(2, False, 512, 1024), recompute="full")
    ranks = replace(job, mesh=MeshSpec(dp_shard=8, ep=4))
    for each in (job, ranks, replace(ranks, recipe=replace(ranks.recipe, loss="fused", keep_logits=False))):
        assert_explained(estimate(each))
    adapted = replace(ranks, model=replace(ranks.model, adapter=AdapterSpec(rank=8, targets="attention,mlp,eh_proj")))
    assert_explained(estimate(adapted))
    assert "eh_proj.lora_A.default.weight" in {one.name for run in layout(adapted.model).runs for one in run.parameters}
    repeated = replace(job, model=replace(job.model, predictor_repeats=True))
    kinds = {run.kind: recompute_of(run, compute_of(repeated.recipe)) for run in layout(repeated.model).runs}
    assert kinds == {"full": "full", "moe": "full", "ahead": "none", "moe_ahead": "none"}
    assert estimate(repeated).peak.total_bytes > estimate(job).peak.total_bytes


def test_experts_of_predictions_stay_gathered():
    """Those that several ranks share do, from their forward to the first of their blocks' end in the backward."""
    job = _job(Case(1, False, 128, 4096))
    ranks = replace(job, mesh=MeshSpec(dp_shard=8, ep=4))
    moments = account(ranks.model, ranks.recipe, ranks.mesh, ranks.batch).moments
    held = {one.name for one in moments if any("unsharded until their backward" in line.reason for line in one.lines)}
    assert {"loss, forward", "backward of the loss", "backward: unsharding block 3 of 4"} <= held
    assert "backward: unsharding block 2 of 4" not in held
    (line,) = {line for one in moments for line in one.lines if "unsharded until their backward" in line.reason}
    assert line.n_bytes == 2 * (EXPERTS // 4) * 2 * SHAPE["hidden_size"] * SHAPE["moe_intermediate_size"]


@pytest.mark.parametrize(("said", "refused"), [
    ({"engine": "ddp", "zero_stage": 0}, "engine 'ddp'"), ({"loss": "chunked", "keep_logits": False}, "loss 'chunked'"),
    ({"recompute": "full", "recompute_layers": 2}, "recompute_layers")])  # fmt: skip
def test_what_is_not_modelled_with_predictions_is_refused(said: dict[str, Any], refused: str):
    job = _job(Case(1, False, 128, 4096))
    with pytest.raises(SpecError, match=f"multi-token prediction with {refused} is not modelled"):
        replace(job, recipe=replace(job.recipe, **{"fused_kernels": None, **said}))
    with pytest.raises(SpecError, match="whose pattern then ends in aeae"):
        replace(job.model, predictions=2)
    with pytest.raises(SpecError, match="predictions is estimated from its source"):
        refuse_unrunnable(replace(job, recipe=replace(job.recipe, fused_kernels=None)))
