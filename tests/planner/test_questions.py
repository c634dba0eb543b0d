"""The smallest and the largest that fits, beside a search through everything; and what a plan refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.profiles import by_hand
from zeroplan import JobSpec, MeshSpec, RecipeSpec, SpecError, estimate, job
from zeroplan.job_time import time_of
from zeroplan.planner import Fixed, Plan, cheapest, fewest_gpus, largest_batch, largest_model, longest_sequence, plan, questions
from zeroplan.planner.asking import Question, _largest_in_a_replay, ask
from zeroplan.planner.explain import binding
from zeroplan.planner.objectives import OBJECTIVES
from zeroplan.planner.rules import NoLayoutError
from zeroplan.planner.search import weights_alone_are_too_large
from zeroplan.planner.space import WHOLE, numbers
from zeroplan.resolve import Request
from zeroplan.spec.profile import model_of

if TYPE_CHECKING:
    from pathlib import Path

    from zeroplan.planner.objectives import Objective
    from zeroplan.planner.space import Degrees
    from zeroplan.spec.recipe import Engine

ALONE = Fixed(
    engine="fsdp2", zero_stage=3, recompute="full", loss="full", optimizer_impl="fused", offload_optimizer="none",
    offload_param="none", tp=1, cp=1, pp=1, ep=1,
)  # fmt: skip
LARGE = {"model": "llama-3.1-70b", "gpu": "a100-sxm-40gb", "seq_len": 1024}


def on(base: JobSpec, gpus: int) -> JobSpec:
    return replace(base, mesh=MeshSpec(dp_shard=gpus))


def fewest(base: JobSpec, fixed: Fixed) -> Plan:
    return fewest_gpus(base, fixed, objective="throughput", mfu=None)[0]


def one_by_one(base: JobSpec, fixed: Fixed, counts: range) -> int:
    return next(gpus for gpus in counts if plan(on(base, gpus), fixed).best is not None)


@pytest.mark.parametrize(
    ("fixed", "counts"),
    [
        (ALONE, range(8, 65, 8)),
        (replace(ALONE, global_batch_size=360), (8, 24, 40, 72, 120, 360)),  # neither 32, 48 nor 64 divide it
        (replace(ALONE, global_batch_size=10, tp=8, pp=5), (40, 80)),
    ],
)
def test_the_fewest_gpus_are_those_of_a_search_one_by_one(fixed: Fixed, counts: range):
    base = job(**LARGE)
    best = fewest(base, fixed).best
    assert best is not None
    assert best.layout.job.mesh.world_size == one_by_one(base, fixed, counts)


def test_where_nothing_fits_the_closest_is_on_the_most_gpus():
    answer = fewest(job(params="1e13", gpu="t4", seq_len=512, precision="fp16-mixed"), replace(ALONE, micro_batch_size=1))
    assert answer.best is None
    assert {rival.layout.job.mesh.world_size for rival in answer.rivals} == {4096}


def test_no_number_of_gpus_takes_an_uneven_batch():
    said = (
        "model and batch divide no number of GPUs that is tried (whole nodes of 8, up to 4,096); use other degrees, "
        "or another batch"
    )
    with pytest.raises(SpecError, match=re.escape(said)):
        fewest(job(**LARGE), replace(ALONE, global_batch_size=640, micro_batch_size=7))
    with pytest.raises(SpecError, match="the requested degrees do not divide 4 GPUs; use others, or more GPUs"):
        plan(job(**LARGE, gpus=4), replace(ALONE, tp=8))


def test_the_cheapest_is_asked_for_where_the_model_can_be_split_so():
    asked = replace(ALONE, tp=4, dp_replicate=2)
    answer = cheapest(job(model="llama-3.2-1b", gpu="h100", gpus=16, seq_len=1024), asked, mfu=None)
    assert answer.best is not None
    assert answer.best.layout.job.mesh.world_size in (8, 16)  # fewer have no two replicas of four


def test_the_largest_model_of_another_optimizer_and_stage():
    """At stage 2 a GPU gathers all weights; a plain SGD keeps nothing, so more fits; the next count in two digits does not."""

    def at(count: int) -> JobSpec:
        return job(
            params=count, gpus=4, gpu="t4", seq_len=512, optimizer="sgd", engine="fsdp2", stage=2, precision="fp16-mixed"
        )

    fixed = replace(ALONE, zero_stage=2, micro_batch_size=1, optimizer_impl=None)
    largest = largest_model(at, fixed)
    assert 2 * largest < 16 * 2**30
    further = [largest + step * 10 ** (len(str(largest)) - 2) for step in range(1, 5)]
    fits = [(found := plan(at(count), fixed).best) is not None and not found.tight for count in (largest, *further)]
    assert fits == [True, False, False, False, False]
    assert largest > largest_model(lambda count: replace(at(count), recipe=replace(at(count).recipe, optimizer="adamw")), fixed)


def test_what_no_file_can_say_is_left_out_of_the_extremes():
    """With FSDP2 inexpressible, the answer is that of the other engines."""
    base = job(model="llama-3.2-1b", gpu="a10-24gb", gpus=2, seq_len=1024)
    others = replace(ALONE, engine="ddp", zero_stage=0, micro_batch_size=None)
    either = replace(others, engine=None, zero_stage=None)

    def inexpressible(recipe: RecipeSpec, _: Degrees) -> str:
        return "" if (recipe.engine, recipe.zero_stage) == ("ddp", 0) else "it has no words for it"

    assert longest_sequence(base, either, inexpressible) == longest_sequence(base, others) < longest_sequence(base, either)
    assert largest_batch(base, either, inexpressible) == largest_batch(base, others) < largest_batch(base, either)


def test_where_nothing_fits_comfortably_on_the_gpu_alone_offload_or_a_tight_fit_is_the_answer():
    request = Request(model="qwen3-8b", gpus=4, gpu="a100-sxm-40gb", engine="fsdp2")
    found = ask(request, Question(max_seq=True))
    assert found.best is not None
    assert found.best.layout.job.recipe.offloads
    assert any("fits with offload to host memory" in note for note in found.notes)
    kept = ask(replace(request, offload_optimizer="none"), Question(max_seq=True))
    alone = ask(Request(model="llama-3.1-8b", gpus=4, gpu="h100", engine="deepspeed"), Question(max_seq=True))
    assert alone.best is not None
    layouts = [alone.best.layout, *(one.layout for one in alone.rivals)]
    assert not any(one.job.recipe.offloads for one in layouts)
    assert kept.best is not None
    assert kept.best.tight
    assert 4096 <= kept.best.layout.job.batch.seq_len < found.best.layout.job.batch.seq_len


def test_the_longest_sequence_of_ranks_that_split_a_model_with_a_window_ends_before_it():
    """Mistral's 4,096: beyond it only ranks that do not split are modelled, and they go further."""
    base = job(model="mistral-7b", gpu="h100", gpus=8, seq_len=128)
    split, alone = replace(ALONE, tp=2), replace(ALONE, tp=None)
    assert longest_sequence(base, split) == 4096 - 128
    assert longest_sequence(base, alone) == longest_sequence(base, ALONE) > 4096
    asked = Request(model="mistral-7b", gpu="h100", gpus=8, engine="fsdp2", stage=3, recompute="full", tensor_parallel=2,
                    pipeline_parallel=1, context_parallel=1)  # fmt: skip
    (note,) = (one for one in ask(asked, Question(max_seq=True)).notes if "longest sequence" in one)
    assert note == (
        "the longest sequence that fits with 5% of the GPU free: 3,968 tokens (a multiple of 128); longer ones, beyond the window "
        "of 4,096, are not modelled on ranks that split the model"
    )


@pytest.mark.parametrize(("model", "beyond"), [("gpt2", False), ("llama-2-7b", True)])
def test_the_longest_sequence_says_where_it_is_beyond_the_model_s_positions(model: str, *, beyond: bool):
    """GPT-2's positions are a table, which ends; Llama's are computed, and go on beyond what was configured."""
    asked = Request(model=model, gpu="h100", gpus=8, engine="fsdp2", stage=3, recompute="full", tensor_parallel=1,
                    pipeline_parallel=1, context_parallel=1)  # fmt: skip
    answer = ask(asked, Question(max_seq=True))
    assert answer.best is not None
    length, positions = answer.best.layout.job.batch.seq_len, answer.base.model.max_position_embeddings
    note = f"sequence length {length:,} is beyond the {positions:,} positions this model was configured for"
    assert (note in answer.notes, length > positions) == (beyond, beyond)


@pytest.mark.parametrize(
    ("question", "note"),
    [(Question(max_seq=True), "not even 128 tokens fit"), (Question(max_batch=True), "not even one sequence fits")],
)
def test_where_the_least_does_not_fit_the_answer_says_so(question: Question, note: str):
    asked = Request(model="llama-3.1-405b", gpu="t4", gpus=2, engine="fsdp2", stage=3, precision="fp16-mixed",
                    recompute="full", offload_optimizer="none", offload_param="none")  # fmt: skip
    answer = ask(asked, question)
    assert answer.best is None
    assert note in answer.notes


def test_what_a_plan_needs_to_know():
    with pytest.raises(SpecError, match=r"a plan needs a GPU to fit; add --gpu NAME \(`zeroplan gpus` lists them\)"):
        plan(job(model="gpt2"), Fixed())
    traced = replace(job(model="gpt2", gpu="h100"), model=model_of(by_hand()))
    with pytest.raises(SpecError, match="the profile of by hand does not contain the number of operations of its module"):
        plan(traced, Fixed())
    with pytest.raises(SpecError, match="no engine has this combination"):
        plan(job(model="gpt2", gpu="h100", gpus=2), Fixed(engine="megatron", offload_optimizer="cpu"))
    said = "--grad-accum 3 does not divide the 8 sequences of a GPU in --global-batch 64"
    with pytest.raises(SpecError, match=said):
        plan(job(model="gpt2", gpu="h100", gpus=8), Fixed(global_batch_size=64, grad_accum_steps=3))


def test_a_deepspeed_configuration_leaves_nothing_to_plan(tmp_path: Path):
    file = tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(
        SpecError,
        match="--from with a DeepSpeed configuration: the file already fixes what a plan would search; use `zeroplan estimate`",
    ):
        ask(Request(model="gpt2", gpu="h100", from_file=str(file)), Question())


def test_a_batch_that_one_way_of_splitting_cannot_cut_is_counted_as_cut():
    """Eight sequences over 16 GPUs: not with each of them on its own, but with two or more of them at one."""
    base = job(model="llama-3.2-1b", gpu="h100", gpus=16, seq_len=1024)
    fixed = Fixed(engine="fsdp2", global_batch_size=8, pp=1, cp=1)
    found = plan(base, fixed)
    assert found.best is not None
    assert found.best.layout.job.mesh.model_ranks >= 2
    grid, indivisible = numbers(base.recipe, base, fixed, WHOLE)
    assert (grid.layouts, indivisible > 0) == (0, True)


def test_quantised_weights_are_never_too_large_by_their_count_alone():
    """70e9 weights are 140 GB in bf16 and 35 in four bits: under adapters an H100 holds these, and not those."""
    whole, packed = (job(model="llama-3.1-70b", gpu="h100", lora_rank=8, engine="ddp", recompute="full", seq_len=512, **said)
                     for said in ({}, {"quantize": "nf4"}))  # fmt: skip
    assert (estimate(whole).fits, estimate(packed).fits) == (False, True)
    assert weights_alone_are_too_large(whole, whole.recipe)
    assert not weights_alone_are_too_large(packed, packed.recipe)


@pytest.mark.parametrize(("engine", "gpus", "words"), [("ddp", 64, "the links: "), ("ddp", 1, "the GPU's speed: ")])
def test_what_holds_a_layout_back_is_the_largest_part_of_its_step(engine: Engine, gpus: int, words: str):
    """Sixteen tokens on each of 64 GPUs wait for gradients; alone they compute, or step."""
    found = time_of(job(model="llama-3.2-1b", gpu="h100", gpus=gpus, gpus_per_node=1, engine=engine, stage=0, seq_len=16))
    seconds = {part.name: float(part.seconds) for part in found.parts}
    name = max(seconds, key=lambda one: seconds[one])
    assert binding(found, None) == f"{words}{name} takes {seconds[name] / sum(seconds.values()):.0%} of the step"


@pytest.mark.parametrize("engine", ["fsdp2", None])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_answers_a_batch_that_divides_the_gpus_that_are_there(objective: Objective, engine: Engine | None):
    """The cheapest is looked for on fewer GPUs, too, and 500 sequences go evenly onto no layout of 64 of them."""
    asked = Request(model="llama-3.1-8b", gpu="h100", gpus=100, engine=engine)
    answer = ask(asked, Question(objective=objective, global_batch=500))
    assert answer.best is not None
    mesh, batch = answer.best.layout.job.mesh, answer.best.layout.job.batch
    assert mesh.world_size <= 100 if objective == "cost" else mesh.world_size == 100
    assert mesh.world_size // mesh.model_ranks * batch.micro_batch_size * batch.grad_accum_steps == 500


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gpus_that_a_batch_does_not_go_onto_are_refused_but_where_fewer_are_looked_at(objective: Objective):
    """500 sequences go evenly onto 64 GPUs only where several share a sequence, which DeepSpeed's do not."""
    asked = Request(model="llama-3.1-8b", gpu="h100", gpus=64, engine="deepspeed")
    question = Question(objective=objective, global_batch=500)
    if objective == "cost":
        best = ask(asked, question).best
        assert best is not None
        assert best.layout.job.mesh.world_size < 64
    else:
        with pytest.raises(SpecError, match=r"^--global-batch 500 sequences are not divisible by 64 GPUs; use 448, say$"):
            ask(asked, question)


def test_numbers_of_gpus_on_which_no_layout_can_be_tried_say_nothing_of_the_others():
    """DeepSpeed splits no model, so that four sequences go onto one, two and four GPUs alone: none of which is enough."""
    asked = Request(model="llama-3.1-70b", gpu="h100", stage=1, engine="deepspeed")
    answer = ask(asked, Question(min_gpus=True, global_batch=4))
    assert answer.best is None
    assert {rival.layout.job.mesh.world_size for rival in answer.rivals} == {4}


def test_where_no_number_of_gpus_has_a_layout_the_reason_is_that_of_the_most():
    asked = Request(model="llama-3.1-8b", gpu="h100", gpus=6, pipeline_parallel=3, engine="fsdp2", tensor_parallel=1,
                    context_parallel=1)  # fmt: skip
    said = "the pipeline has fewer micro-batches than ranks, or a number that is no multiple of its ranks"
    with pytest.raises(SpecError, match=f"^no layout can be tried: {said}$"):
        ask(asked, Question(objective="cost", global_batch=4))


def test_the_fewest_gpus_are_without_offload_and_a_note_says_what_offload_would_do():
    asked = Request(model="llama-3.1-8b", gpu="h100", seq_len=1024, engine="fsdp2", stage=3, recompute="full")
    answer = ask(asked, Question(min_gpus=True))
    assert answer.best is not None
    assert not answer.best.layout.job.recipe.offloads_states
    assert answer.base.mesh.world_size > 1
    assert any(note.startswith("with offload it fits on 1, ") for note in answer.notes)
    assert any(note.startswith("numbers of GPUs that were tried: ") for note in answer.notes)


def test_larger_numbers_of_gpus_on_which_nothing_fits_are_named(monkeypatch: pytest.MonkeyPatch):
    """Nothing fits on 8 here, as if its shards were too uneven."""
    planned, fits = questions._on, questions._fits
    asked = Request(model="llama-3.2-1b", gpu="a10-24gb", seq_len=512, engine="fsdp2", stage=3, recompute="full")
    monkeypatch.setattr(
        questions, "_fits", lambda base, *more, **settings: base.mesh.world_size != 8 and fits(base, *more, **settings)
    )
    monkeypatch.setattr(
        questions, "_on", lambda gpus, base, **more: NoLayoutError("none") if gpus == 8 else planned(gpus, base, **more)
    )  # fmt: skip
    answer = ask(asked, Question(min_gpus=True))
    assert answer.base.mesh.world_size < 8
    (said,) = (note for note in answer.notes if note.startswith("of the next numbers of GPUs"))
    assert re.fullmatch(r"of the next numbers of GPUs, up to \d+, nothing fits on 8", said)


def test_the_longest_sequence_that_fits_tightly_is_longer_and_named():
    asked = Request(model="llama-3.1-8b", gpu="h100", gpus=8, engine="fsdp2", stage=3, recompute="full", context_parallel=1,
                    tensor_parallel=1, pipeline_parallel=1)  # fmt: skip
    (note,) = (one for one in ask(asked, Question(max_seq=True)).notes if "longest sequence" in one)
    found = re.fullmatch(
        r"the longest sequence that fits with 5% of the GPU free: ([\d,]+) tokens \(a multiple of 128\)(?:; with offload[^;]*)?"
        r"; tightly, at most: ([\d,]+)", note,
    )  # fmt: skip
    assert found is not None, note
    assert int(found[1].replace(",", "")) < int(found[2].replace(",", ""))


@pytest.mark.parametrize(("most", "goes"), [(60, 60), (60, 37), (60, 1), (60, 0), (128 * 40, 128 * 17)])
def test_the_largest_number_that_goes_through_is_found(most: int, goes: int):
    """Of what fits tightly by its peak, where a replay goes through up to some number alone."""
    asked = []

    def answer(number: int) -> SimpleNamespace:
        asked.append(number)
        return SimpleNamespace(best=number if number <= goes else None)

    assert _largest_in_a_replay(most, answer) == goes
    assert len(asked) <= 9


@pytest.mark.parametrize(
    ("said", "sequences"),
    [
        ({"gpus": 8, "seq_len": 4096}, 512),  # 64 of a GPU
        ({"gpus": 1, "seq_len": 1024}, 64),
        ({"gpus": 64, "seq_len": 8192}, 512),  # 4,194,304 tokens
        ({"gpus": 24, "seq_len": 4096}, 768),  # the largest power of two on each that does not exceed them
        ({"gpus": 64, "seq_len": 131072}, 64),  # one of a GPU is more
        ({"gpus": 8, "seq_len": 4096, "micro_batch": 3}, 768),
    ],
)
def test_without_a_batch_all_layouts_train_on_as_many_tokens(said: dict[str, int], sequences: int):
    asked = Request(model="llama-3.2-1b", gpu="h100-sxm-80gb", engine="fsdp2", stage=3, recompute="full", **said)  # type: ignore[arg-type]
    found = ask(asked, Question())
    assert found.best is not None
    batch, mesh = found.best.layout.job.batch, found.best.layout.job.mesh
    assert batch.micro_batch_size * batch.grad_accum_steps * mesh.dp_replicate * mesh.dp_shard == sequences
    assert f"zeroplan assumes {sequences:,} sequences per step ({sequences * said['seq_len']:,} tokens)" in " ".join(
        found.notes
    )
    same = ask(asked, Question(global_batch=sequences))
    assert (same.best, any("assumes" in note for note in same.notes)) == (found.best, False)


def test_a_batch_is_assumed_only_where_the_question_leaves_it_open(tmp_path: Path):
    asked = Request(model="gpt2", gpu="l4-24gb", gpus=2, seq_len=512, engine="ddp")
    open_file, fixed_file = tmp_path / "open.json", tmp_path / "fixed.json"
    open_file.write_text('{"bf16": true, "learning_rate": 1e-4, "num_train_epochs": 1}')
    fixed_file.write_text('{"bf16": true, "learning_rate": 1e-4, "per_device_train_batch_size": 4}')
    from_files = (
        Request(model="gpt2", gpu="l4-24gb", gpus=2, seq_len=512, from_file=str(one)) for one in (open_file, fixed_file)
    )
    assumed, kept = (ask(one, Question()) for one in from_files)
    assert any("global batch not given" in note for note in assumed.notes)
    for answer in (kept, ask(replace(asked, grad_accum=1), Question()), ask(asked, Question(max_batch=True))):
        assert answer.best is not None
        assert answer.best.layout.job.batch.grad_accum_steps == 1
        assert not any("global batch not given" in note for note in answer.notes)


def test_a_pipeline_is_found_without_a_batch():
    """Llama 3.1 405B on 1,024 GPUs: with one micro-batch per step a pipeline would idle, so that sharding alone seemed best."""
    found = ask(Request(model="llama-3.1-405b", gpu="h100-sxm-80gb", gpus=1024), Question())
    assert found.best is not None
    assert found.best.layout.job.mesh.tp == 8
    assert found.best.layout.job.mesh.pp > 1
