"""A rank of a pipeline: its stages, micro-batches in flight, sends, formulas, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines.columns import Columns
from tests.formulas import assert_explained
from zeroplan.engines.pipeline import accounts, accounts_of, highest_of, ranks_in_question
from zeroplan.engines.pipeline.schedule import Place
from zeroplan.engines.pipeline.walk import gathers, states, unshards
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate, needed
from zeroplan.ledger import Collective, Kind, Phase
from zeroplan.report.text import estimate_text
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.spec.pipeline import cut
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec

_MODEL = ModelSpec(family="llama", hidden_size=64, intermediate_size=160, num_hidden_layers=8, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=16, vocab_size=256)  # fmt: skip


def _job(
    *, pp: int = 4, micro_batches: int = 6, layers: int = 8, split: dict[str, int] | None = None, **recipe: object
) -> JobSpec:
    mesh = MeshSpec(pp=pp, dp_shard=2, **(split or {}))
    return JobSpec(
        model=_model(layers), mesh=mesh, recipe=RecipeSpec(zero_stage=2, **recipe),  # type: ignore[arg-type]
        batch=BatchSpec(micro_batch_size=2, seq_len=32, grad_accum_steps=micro_batches),
    )  # fmt: skip


def _model(layers: int) -> ModelSpec:
    return replace(_MODEL, num_hidden_layers=layers)


def _batch(micro_batches: int) -> BatchSpec:
    return BatchSpec(micro_batch_size=2, seq_len=32, grad_accum_steps=micro_batches)


def test_layers_are_distributed_as_in_torchtitan() -> None:
    """Embedding and head count as one layer each."""
    assert [(one.start, one.stop) for one in cut(126, 16)] == [
        (0, 7), *((7 + 8 * at, 15 + 8 * at) for at in range(14)), (119, 126),
    ]  # fmt: skip
    assert [stage.layers for stage in cut(8, 4)] == [2, 3, 2, 1]


@pytest.mark.parametrize(("rank", "in_flight"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_a_rank_has_as_many_micro_batches_in_flight_as_there_are_stages_from_it_on(rank: int, in_flight: int) -> None:
    """Narayanan et al. 2021, arXiv:2104.04473, section 2.2: 1F1B has at most as many micro-batches in flight as stages."""
    walk = states(Place("1f1b", rank, 4, 1, 64), resharded=False)
    assert max(state.in_flight[0] for state in walk if state.kind == "backward") + 1 == in_flight
    everything = states(Place("gpipe", rank, 4, 1, 64), resharded=False)
    assert max(state.in_flight[0] for state in everything if state.kind == "backward") + 1 == 64


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"])
def test_the_list_of_moments_does_not_grow_with_micro_batches(schedule: str) -> None:
    few, many = (estimate(_job(pp=2, micro_batches=count, pipeline_schedule=schedule)) for count in (16, 128))
    assert len(many.engine_moments) <= len(few.engine_moments)


def test_ranks_have_the_whole_model_together() -> None:
    answer = estimate(_job())
    assert sum(one.parameters for one in answer.pipeline) == answer.parameters
    assert answer.peak_bytes == max(int(one.peak_bytes) for one in answer.pipeline) + sum(
        int(line.n_bytes) for line in answer.workspaces
    )
    assert "rank 1: 129,408 parameters" in estimate_text(answer, verbose=True)
    assert "blocks 3 to 5 <- this one" in estimate_text(answer, verbose=True)


@pytest.mark.parametrize(("pp", "schedule"), [(4, "1f1b"), (2, "zbv")])
def test_a_column_of_shards_and_micro_batch_sizes_is_its_points(pp: int, schedule: str) -> None:
    job = _job(pp=pp, pipeline_schedule=schedule)
    points = [
        (replace(job.mesh, dp_shard=shards), replace(job.batch, micro_batch_size=size))
        for shards, size in ((2, 1), (4, 2), (8, 3))
    ]
    columns = accounts(job.model, job.recipe, Columns(points), Columns(points))  # type: ignore[arg-type]
    for at, (mesh, batch) in enumerate(points):
        for rank, point in enumerate(accounts(job.model, job.recipe, mesh, batch)):
            assert columns[rank].pipeline[0].peak_bytes[at] == point.pipeline[0].peak_bytes  # type: ignore[index]
    assert needed(job, job.batch).least_bytes == estimate(job).least_bytes


def test_hidden_states_go_up_and_their_gradients_down_once_for_each_micro_batch() -> None:
    hidden = 2 * 32 * 64 * 2
    sent = [
        {call.what: call.sent_bytes for call in one.collectives if call.operation == "send"}
        for one in accounts(_job().model, _job().recipe, _job().mesh, _job().batch)
    ]
    up, down = "hidden states to the next stage", "gradients to the stage before"
    assert sent == [{up: 6 * hidden}, *[{up: 6 * hidden, down: 6 * hidden}] * 2, {down: 6 * hidden}]


def test_resharded_stages_are_gathered_unless_a_backward_left_them_whole() -> None:
    assert gathers(Place("gpipe", 1, 4, 1, 8), resharded=True)[0] == (8, 1)
    assert gathers(Place("1f1b", 1, 4, 1, 8), resharded=True)[0] == (3, 6)
    assert gathers(Place("1f1b", 1, 4, 1, 8), resharded=False)[0] == (1, 0)


def test_a_stage_that_torch_shards_between_its_passes_is_gathered_again() -> None:
    """Three of a rank's stages are unsharded at once: four take turns, and three need not."""
    assert unshards(Place("interleaved-1f1b", 0, 2, 3, 4)) == ((1, 0),) * 3
    four = unshards(Place("interleaved-1f1b", 0, 2, 4, 4))
    assert sum(map(sum, four)) > 4
    walk = states(Place("interleaved-1f1b", 0, 2, 4, 4), resharded=False)
    assert all(sum(one.whole) <= 3 for one in walk)
    job = _job(pp=2, micro_batches=4, layers=14, pipeline_schedule="interleaved-1f1b", pipeline_stages_per_rank=4)
    root, *_ = (one for one in estimate(job, pipeline_rank=0).traffic.collectives if one.is_root)
    assert root.calls == four[0].forward


@pytest.mark.parametrize("replicas", [1, 2])
def test_muon_sends_on_the_ranks_of_a_pipeline_what_it_sends_for_their_layers(replicas: int) -> None:
    split = {"dp_replicate": replicas}
    ranks, whole = (_job(pp=pp, optimizer="muon", split=split) for pp in (4, 1))
    of_each = accounts(ranks.model, ranks.recipe, ranks.mesh, ranks.batch)
    per_layer, rest = divmod(_by_muon(estimate(whole).traffic.collectives), 8)
    assert (per_layer > 0, rest) == (True, 0)
    assert [_by_muon(one.collectives) for one in of_each] == [per_layer * stage.layers for stage in cut(8, 4)]


def _by_muon(calls: tuple[Collective, ...]) -> int:
    return sum(int(call.payload_bytes) for call in calls if call.phase is Phase.STEP)


def test_gradients_are_reduced_once() -> None:
    answer = estimate(_job())
    reduced = sum(int(call.calls) for call in answer.traffic.collectives if call.operation == "reduce_scatter")
    assert reduced == 3
    assert any(line.kind is Kind.UNSHARDED_GRADIENTS for line in answer.peak.lines)


@pytest.mark.parametrize(
    ("schedule", "recompute", "each"),
    [("1f1b", "none", None), ("1f1b", "full", None), ("interleaved-1f1b", "none", None), ("interleaved-1f1b", "full", None),
     ("interleaved-1f1b", "none", 4), ("interleaved-zero-bubble", "none", None), ("zbv", "none", None)],
)  # fmt: skip
def test_formulas_give_the_bytes_of_their_lines(schedule: str, recompute: str, each: int | None) -> None:
    job = _job(pp=2, layers=14 if each else 8, pipeline_schedule=schedule, recompute=recompute, pipeline_stages_per_rank=each)
    for rank in (0, 1):
        assert_explained(estimate(job, pipeline_rank=rank))


@pytest.mark.parametrize(("recompute", "split"), [("none", {"tp": 2}), ("full", {"tp": 2}), ("none", {"cp": 2})])
def test_formulas_of_a_split_stage_give_the_bytes_of_their_lines(recompute: str, split: dict[str, int]) -> None:
    job = _job(pp=2, recompute=recompute, split=split)
    for rank in (0, 1):
        assert_explained(estimate(job, pipeline_rank=rank))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_formulas_of_an_expert_parallel_stage_give_the_bytes_of_their_lines(zero_stage: int) -> None:
    moe = MoeSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=160)
    experts = replace(_MODEL, family="mixtral", moe=moe)
    job = replace(_job(pp=2), model=experts, mesh=MeshSpec(pp=2, dp_shard=4, ep=2), recipe=RecipeSpec(zero_stage=zero_stage))
    for rank in (0, 1):
        answer = estimate(job, pipeline_rank=rank)
        assert_explained(answer)
        assert "even routing" in " ".join(answer.notes)


def test_each_rank_of_a_split_stage_sends_its_share_of_the_hidden_states() -> None:
    """The note names the rank to verify: the first of those that share the stage."""
    whole, split = (estimate(_job(split={"tp": tp})) for tp in (1, 2))
    sent = [sum(int(call.sent_bytes) for call in one.traffic.collectives if call.operation == "send") for one in (whole, split)]
    assert sent[0] == 2 * sent[1]
    rank = split.pipeline[0].rank
    assert f"verify it as rank {rank * 4}" in " ".join(split.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pipeline_schedule": "1f1b", "pipeline_stages_per_rank": 2}, "has one stage on each rank, not 2"),
        ({"pipeline_schedule": "zbv", "pipeline_stages_per_rank": 3}, "has two stages on each rank, not 3"),
        ({"pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": 1}, "needs several stages"),
        ({"pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": 3}, "leave one without a layer"),
        ({"loss": "fused"}, "loss 'fused' is not modelled"),
        ({"loss": "chunked", "pipeline_schedule": "zbv"}, "schedule 'zbv' and loss 'chunked' is not modelled"),
        ({"fsdp2": Fsdp2Options(reshard_after_forward=2)}, "reshard_after_forward as a number is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _job(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"recompute": "full"},
            "recompute 'full' .which would run for each weight. is not modelled; use recompute none, or",
        ),
        ({"fsdp2": Fsdp2Options(reshard_after_forward=True)}, "loses gradients of weights that are sharded again"),
        (
            {"pipeline_schedule": "interleaved-zero-bubble", "pipeline_stages_per_rank": 4},
            "with 4 stages on each rank is not modelled",
        ),
    ],
)
def test_what_is_not_modelled_of_several_stages_is_refused(change: dict[str, object], message: str) -> None:
    job = _job(pp=2, layers=14, **{"pipeline_schedule": "zbv", **change})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=message):
        estimate(job)


def test_in_zbv_the_first_stage_does_not_split_its_backward_and_the_last_rank_sends_nothing_to_itself() -> None:
    for rank, in_flight in ((0, 8), (3, 5)):
        place = Place("zbv", rank, 4, 2, 16)
        walk = states(place, resharded=False, widened=True)
        assert max(state.in_flight[0] for state in walk if state.kind == "forward") + 1 == in_flight
        assert {state.kind for state in walk if state.chunk == 0} == {
            "forward", "reducing", *(("backward",) if rank == 0 else ("input", "weights")),
        }  # fmt: skip
    calls = accounts(_model(14), RecipeSpec(zero_stage=2, pipeline_schedule="zbv"), MeshSpec(pp=4), _batch(16))[3].collectives
    assert sorted(int(call.calls) for call in calls if call.operation == "send") == [16, 16]


def test_rounds_of_an_interleaved_schedule_must_divide_the_micro_batches() -> None:
    with pytest.raises(SpecError, match="9 micro-batches on 2 ranks in 4 rounds"):
        _job(pp=2, micro_batches=9, pipeline_schedule="interleaved-1f1b")


def test_a_schedule_needs_a_pipeline_and_a_known_family() -> None:
    for said in ({"pipeline_schedule": "1f1b"}, {"pipeline_layers": "8"}):
        with pytest.raises(SpecError, match="pp=1 has nothing to do"):
            _job(pp=1, **said)
    with pytest.raises(SpecError, match="family 'gemma2' is not modelled"):
        replace(_job(), model=replace(_MODEL, family="gemma2"))


def test_a_tied_head_has_a_copy_on_the_last_stage() -> None:
    untied = _job()
    tied = replace(untied, model=replace(_MODEL, tie_word_embeddings=True))
    assert estimate(tied).peak_bytes == estimate(untied).peak_bytes
    assert any("has a copy of its own" in note for note in estimate(tied).notes)


def test_a_user_can_set_the_layers_of_stages() -> None:
    asked = _job(pipeline_layers="1,3,3,1")
    every = accounts(asked.model, asked.recipe, asked.mesh, asked.batch)
    assert [one.pipeline[0].stages for one in every] == [
        "embedding, block 1", "blocks 2 to 4", "blocks 5 to 7", "block 8, norm and head",
    ]  # fmt: skip
    assert "Model states" in estimate_text(estimate(asked), verbose=True)
    even = estimate(_job(pipeline_layers="2,3,2,1"))
    assert even.peak_bytes == estimate(_job()).peak_bytes  # torchtitan's distribution of eight layers


@pytest.mark.parametrize(
    ("layers", "said"),
    [("4,4", "8 layers to 2 stages, and there are 8 layers and 4 stages"), ("2,2,2,1", "7 layers to 4 stages"),
     ("0,4,2,2", "leave one without a layer"), ("2,x,2,2", "is not a list of layers; write, for example, 7,9,9,7")],
)  # fmt: skip
def test_layers_of_stages_that_do_not_fit_the_model_are_refused(layers: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        _job(pipeline_layers=layers)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "batch", [BatchSpec(grad_accum_steps=8), BatchSpec(micro_batch_size=4, seq_len=2048, grad_accum_steps=16)]
)
def test_the_ranks_that_are_tried_include_the_one_with_the_highest_peak(
    schedule: str, recompute: str, batch: BatchSpec
) -> None:
    """With few activations in flight, states and the head decide which rank it is; with many, the activations."""
    recipe = RecipeSpec(recompute=recompute, pipeline_schedule=schedule)
    for pp, stage in ((2, 3), (4, 2), (4, 3)):
        recipe = replace(recipe, zero_stage=stage)
        said = _model(16), recipe, MeshSpec(dp_shard=4, pp=pp), batch
        ranks = accounts_of(ranks_in_question(recipe, pp), *said)
        assert highest_of(ranks).pipeline[0] == highest_of(accounts(*said)).pipeline[0]


def test_the_highest_rank_may_be_the_first_without_recomputed_blocks() -> None:
    """The ranks of the first layers recompute them and keep little, so that neither is the highest."""
    recipe = RecipeSpec(recompute="full", recompute_layers=8)
    said = _model(16), recipe, MeshSpec(dp_shard=4, pp=4), BatchSpec(micro_batch_size=4, seq_len=2048, grad_accum_steps=16)
    highest = highest_of(accounts(*said)).pipeline[0]
    assert highest.rank == 2
    assert highest_of(accounts_of(ranks_in_question(recipe, 4), *said)).pipeline[0] == highest
