"""The estimate of FSDP1 against simulated FSDP1, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.causal_models import tiny_spec
from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from tests.simulated import simulate
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.fsdp1 import account
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp1Options, RecipeSpec

FEW, MANY = BatchSpec(micro_batch_size=1, seq_len=8), BatchSpec(micro_batch_size=2, seq_len=64)
LORA = AdapterSpec(rank=8)
#: The random state of attention, the loss, and counters of the optimizer step. [bytes]
SCALARS_BYTES = 1700
#: Tolerance with adapters: the cast shard of an adapter's matrix, and the shard of its gradient. [bytes]
OF_AN_ADAPTER = 3000


def job(
    *, batch: BatchSpec = FEW, adapter: AdapterSpec | None = None, tied: bool = False, mesh: dict[str, int] | None = None,
    options: dict[str, object] | None = None, layers: int = 6, vocab: int = 250, **recipe: object,
) -> JobSpec:  # fmt: skip
    model = tiny_spec("llama", ffn=176, vocab=vocab, heads=4, kv_heads=2, head_dim=16, layers=layers)
    said = {"engine": "fsdp1", "zero_stage": 3, "fsdp1": Fsdp1Options(**(options or {})), **recipe}  # type: ignore[arg-type]
    return JobSpec(
        model=replace(model, tie_word_embeddings=tied, adapter=adapter),
        recipe=RecipeSpec(**said),  # type: ignore[arg-type]
        mesh=MeshSpec(**{"dp_shard": 4, **(mesh or {})}),
        batch=batch,
    )


def accumulated(batch: BatchSpec, steps: int) -> BatchSpec:
    return replace(batch, grad_accum_steps=steps)


VIEWS: dict[str, object] = {"use_orig_params": True}
CASES = {
    "plain": job(),
    "recomputed": job(batch=MANY, recompute="full"),
    "shard grad op, views": job(
        zero_stage=2, options=VIEWS, tied=True, batch=accumulated(FEW, 2), sync_every_micro_batch=False
    ),
    "fp32 reduction, three ranks": job(options={"reduce_dtype": "fp32"}, mesh={"dp_shard": 3}),
    "prefetched after": job(options={"backward_prefetch": "backward_post"}),
    "prefetched both ways": job(options={"forward_prefetch": True}, batch=accumulated(FEW, 3), sync_every_micro_batch=False),
    "prefetched both ways, tied": job(
        zero_stage=2,
        options={"forward_prefetch": True},
        tied=True,
        vocab=2000,
        batch=accumulated(FEW, 3),
        sync_every_micro_batch=False,
        optimizer="sgd",
    ),
    "added up, fp32 reduction": job(
        options={"reduce_dtype": "fp32"}, batch=accumulated(FEW, 2), sync_every_micro_batch=False, optimizer="sgd"
    ),
    "replicas, many ranks": job(mesh={"dp_shard": 64, "dp_replicate": 2}, precision="bf16", optimizer="sgd"),
    "summed by micro-batch": job(batch=accumulated(FEW, 3), options=VIEWS),
    "checkpoints around units": job(batch=MANY, recompute="full", options={"checkpoints_units": True}),
}
AWAY: dict[str, object] = {"cpu_offload": True}
CASES |= {
    "offloaded": job(options=AWAY),
    "offloaded, recomputed, three ranks, fp32 reduction": job(
        options=AWAY | {"reduce_dtype": "fp32"}, batch=MANY, recompute="full", mesh={"dp_shard": 3}
    ),
    "offloaded, shard grad op, views, accumulated": job(
        zero_stage=2, options=VIEWS | AWAY, tied=True, batch=accumulated(FEW, 2), sync_every_micro_batch=False
    ),
    "offloaded, shard grad op, summed by micro-batch": job(zero_stage=2, options=AWAY, batch=accumulated(FEW, 3)),
    "offloaded, prefetched both ways": job(
        options=AWAY | {"forward_prefetch": True}, batch=accumulated(FEW, 3), sync_every_micro_batch=False
    ),
    "offloaded, replicas, bf16": job(options=AWAY, mesh={"dp_shard": 64, "dp_replicate": 2}, precision="bf16", optimizer="sgd"),
    "offloaded, fp32": job(options=AWAY, precision="fp32", zero_stage=2, batch=MANY),
    "offloaded, fp32, views": job(options=AWAY | VIEWS, precision="fp32", zero_stage=2, batch=MANY),
    "offloaded, views": job(options=AWAY | VIEWS, optimizer="sgd"),
    "offloaded, views, prefetched after": job(options=AWAY | VIEWS | {"backward_prefetch": "backward_post"}, optimizer="sgd"),
    "offloaded, bf16, views": job(options=AWAY | VIEWS, precision="bf16", batch=MANY, recompute="full"),
}
TIED = job(tied=True, batch=accumulated(FEW, 2), sync_every_micro_batch=False)
ALONE: dict[str, object] = {"backward_prefetch": "no_prefetch"}
ADAPTED = {
    "lora": job(batch=MANY, adapter=LORA, options=VIEWS),
    "lora, not original parameters": job(batch=MANY, adapter=LORA),
    "lora, not original parameters, recomputed": job(batch=MANY, adapter=LORA, recompute="full"),
    "lora, recomputed": job(batch=MANY, adapter=LORA, options=VIEWS, recompute="full"),
    "lora, checkpoints around units": job(
        batch=MANY, adapter=LORA, options=VIEWS | {"checkpoints_units": True}, recompute="full", layers=10
    ),
    "lora, shard grad op": job(batch=MANY, adapter=LORA, options=VIEWS, zero_stage=2, vocab=32),
    "lora, offloaded": job(batch=MANY, adapter=LORA, options=VIEWS | AWAY),
    "lora, offloaded, few tokens": job(adapter=LORA, options=VIEWS | AWAY),
    "lora, offloaded, shard grad op": job(
        batch=accumulated(MANY, 2), adapter=LORA, options=VIEWS | AWAY, zero_stage=2, sync_every_micro_batch=False
    ),
    "lora, offloaded, not prefetched, bf16": job(
        adapter=LORA, options=AWAY | ALONE, recompute="full", precision="bf16", mesh={"dp_shard": 3}
    ),
    "qlora, offloaded": job(batch=MANY, adapter=replace(LORA, quantize="nf4-double"), options=VIEWS | AWAY, recompute="full"),
    "lora, offloaded, shard grad op, not prefetched, bf16": job(
        adapter=LORA, options=AWAY | ALONE, recompute="full", precision="bf16", mesh={"dp_shard": 3}, zero_stage=2
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", [*CASES, *ADAPTED])
def test_a_step_takes_what_the_engine_takes(name: str) -> None:
    pytest.importorskip("transformers")
    asked, off = (CASES[name], SCALARS_BYTES) if name in CASES else (ADAPTED[name], OF_AN_ADAPTER)
    if asked.model.adapter is not None:
        pytest.importorskip("peft")
    found = compare_with_estimate(simulate(asked, steps=2 if not asked.recipe.fsdp1.forward_prefetch else 3))
    plain = asked.recipe.recompute == "none"  # checkpoints hold the CPU's random state on the host
    host = (found.host,) if found.host is not None and plain else ()
    for row in (found.peak, found.held, *host):
        assert abs(row.difference) <= off, row
    for row in found.collectives:
        assert row.difference == 0, row


@pytest.mark.torch
def test_hooked_tensors_and_whole_gradients_of_an_earlier_micro_batch_are_not_too_low() -> None:
    pytest.importorskip("peft")
    around = VIEWS | {"checkpoints_units": True}
    asked = job(
        batch=accumulated(MANY, 2), adapter=LORA, options=around, recompute="full", layers=10, sync_every_micro_batch=False
    )
    found = compare_with_estimate(simulate(asked, steps=2)).peak
    assert 0 <= found.difference / found.measured < 0.06  # the estimate is an upper bound here


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"mesh": {"dp_shard": 1}}, "one rank that shards, where it shards nothing"),
        ({"optimizer": "muon"}, "it takes matrices, and shards are flat"),
        ({"loss": "chunked"}, "loss 'chunked' is not modelled; use loss 'full'"),
        ({"adapter": LORA, "options": {"wraps_adapters": False}}, "adapters in the unit of their block is not modelled"),
        ({"adapter": LORA, "options": {"cpu_offload": True, "ignores_adapters": True}}, "offload to host memory and ignores"),
        ({"adapter": LORA, "recompute": "selective"}, "recompute 'selective' and LoRA is not modelled"),
        ({"options": {"checkpoints_units": True}}, "checkpoints_units without recompute 'full'"),
        ({"zero_stage": 1}, "has no ZeRO stage 1"),
        ({"mesh": {"tp": 2}}, "tp=2 with engine 'fsdp1' is not modelled"),
        ({"mesh": {"pp": 2}}, "engine 'fsdp1'"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(said: dict, expected: str) -> None:
    with pytest.raises(SpecError, match=expected) as refused:
        job(**said)
    assert "\n" not in str(refused.value)


def test_without_prefetch_one_block_less_is_gathered() -> None:
    """When gradients are joined, the block below is gathered already, unless there is no prefetch."""
    least, most = (estimate(job(options={"backward_prefetch": when})) for when in ("no_prefetch", "backward_pre"))
    block = next(symbol.value for symbol in most.symbols if symbol.name == "P_dense")
    joined = [
        max(int(moment.total_bytes) for moment in answer.engine_moments if "joining the gradients of block 6" in moment.name)
        for answer in (least, most)
    ]
    assert joined[1] - joined[0] == 2 * int(block)


def test_the_flat_gradient_and_the_gradients_joined_to_it_are_alive_together() -> None:
    moment = next(
        one for one in estimate(job()).engine_moments if one.name == "backward: joining the gradients of block 6 of 6"
    )
    made, flat = (line for line in moment.lines if line.kind is Kind.UNSHARDED_GRADIENTS and "root" not in line.reason)
    assert made.n_bytes == flat.n_bytes


def test_a_block_that_waits_is_joined_after_a_tied_head_s_gradient_is_added() -> None:
    answer = estimate(job(tied=True, options={"forward_prefetch": True}))
    moment = next(one for one in answer.engine_moments if one.name == "backward: joining the gradients of block 1 of 6")
    elements = next(symbol.value for symbol in answer.symbols if symbol.name == "G_root")
    of_root = [line.n_bytes for line in moment.lines if line.reason.startswith("root group's")]
    assert of_root == [2 * int(elements)]


def test_a_block_waits_for_the_embedding_in_every_micro_batch() -> None:
    """So its parameters and its gradients are there when a tied head's gradient is added, before anything is reduced."""
    at_the_sum = [
        max(int(one.total_bytes) for one in answer.engine_moments if one.name.endswith("gradient, not to be reduced yet"))
        for ahead in (False, True)
        for answer in [estimate(replace(TIED, recipe=replace(TIED.recipe, fsdp1=Fsdp1Options(forward_prefetch=ahead))))]
    ]
    block = next(symbol.value for symbol in estimate(TIED).symbols if symbol.name == "P_dense")
    assert at_the_sum[1] - at_the_sum[0] == 2 * int(block)


@pytest.mark.parametrize("name", [*CASES, *ADAPTED])
def test_every_formula_gives_its_bytes(name: str) -> None:
    answer = estimate({**CASES, **ADAPTED}[name])
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)


def test_a_note_names_copies_of_the_first_step() -> None:
    assert any("in the first step alone" in note for note in estimate(job(adapter=LORA)).notes)
    assert not any("in the first step alone" in note for note in estimate(ADAPTED["lora"]).notes)


def test_gradients_stay_on_the_gpu_until_an_offloaded_backward_ends() -> None:
    """``_saved_grad_shard`` holds each unit's shard on the GPU. In the optimizer's step no gradients are there."""
    answer = estimate(job(options=AWAY, batch=accumulated(FEW, 2)))
    whole = max(int(line.n_bytes) for line in answer.host if line.kind is Kind.GRADIENTS)
    root = next(int(symbol.value) for symbol in answer.symbols if symbol.name == "P_root")
    there = {Phase.BACKWARD: 0, Phase.STEP: 0}
    for moment in answer.engine_moments:
        if moment.phase in there:
            held = sum(int(line.n_bytes) for line in moment.lines if line.kind is Kind.GRADIENTS)
            there[moment.phase] = max(there[moment.phase], held)
    assert there == {Phase.BACKWARD: whole - root, Phase.STEP: 0}  # 4 bytes for each of 4 ranks; the root is reduced last


@pytest.mark.parametrize(
    "asked",
    [job(), job(options=AWAY, zero_stage=2), job(options=VIEWS, zero_stage=2), CASES["prefetched both ways"], ADAPTED["lora"]],
)
def test_a_column_has_what_each_of_its_jobs_has(asked: JobSpec) -> None:
    pytest.importorskip("numpy")
    from tests.engines.columns import Columns, assert_is_its_points

    batches = (BatchSpec(micro_batch_size=1, seq_len=16), accumulated(MANY, 2), accumulated(FEW, 3))
    points = [(MeshSpec(dp_shard=ranks), batch) for ranks in (2, 3, 64) for batch in batches]
    columns = Columns(points)
    whole = account(asked.model, asked.recipe, columns, columns)  # type: ignore[arg-type]
    assert_is_its_points(whole, [account(asked.model, asked.recipe, *point) for point in points])
