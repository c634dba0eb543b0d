"""A trainer that pads the sequences of a micro-batch: a plan counts what attention needs for it."""

import pytest

from zeroplan import estimate, job
from zeroplan.planner import Plan
from zeroplan.planner.asking import Question, ask
from zeroplan.resolve import Request
from zeroplan.resolve.padding import COUNTED

GPUS = {"model": "smollm2-135m", "gpu": "rtx-4090-24gb", "gpus": 2, "seq_len": 2048}


def planned(*, pads: bool = True, **said: object) -> Plan:
    return ask(Request(**{**GPUS, **said}), Question(pads=pads))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_several_sequences_are_padded(engine: str):
    found = planned(engine=engine, micro_batch=4)
    assert found.best is not None
    assert found.best.layout.job.recipe.padded
    assert COUNTED in found.notes
    assert found.best.estimate.peak_bytes == estimate(found.best.layout.job).peak_bytes


def test_one_sequence_is_not():
    found = planned(engine="ddp", micro_batch=1)
    assert found.best is not None
    assert not found.best.layout.job.recipe.padded
    assert COUNTED not in found.notes


def test_both_are_searched_together():
    """One search has micro-batches of one sequence, without padding, and of several, with it."""
    found = planned(engine="ddp", recompute="full")
    assert found.best is not None
    assert found.best.layout.job.recipe.padded == (found.best.layout.job.batch.micro_batch_size > 1)


@pytest.mark.parametrize("said", [{"padded": False}, {"padded": True}])
def test_the_users_own_word_decides(said: dict[str, bool]):
    found = planned(engine="ddp", micro_batch=4, **said)
    assert found.best is not None
    assert found.best.layout.job.recipe.padded == said["padded"]


def test_megatron_is_searched_too_and_is_not_padded():
    """On Megatron-Core trainers join sequences."""
    found = planned(engine="megatron", micro_batch=4)
    assert found.best is not None
    assert not found.best.layout.job.recipe.padded
    assert not any("padding" in note for note in found.notes)


def test_what_is_not_counted_is_in_a_note():
    found = planned(model="smollm2-1.7b", engine="fsdp2", micro_batch=4, tensor_parallel=2)
    assert found.best is not None
    assert any(note.startswith("what attention needs for padding is not counted with tp=2") for note in found.notes)


def test_a_search_with_padding_alone_names_what_it_leaves_out():
    assert any("the search tried only these" in note for note in planned(padded=True).notes)


def test_the_largest_batch_has_room_for_the_mask():
    whole = {**GPUS, "engine": "ddp", "recompute": "none", "attention": "sdpa"}
    padded, equal = (ask(Request(**whole), Question(max_batch=True, pads=pads)) for pads in (True, False))
    assert padded.best is not None
    assert equal.best is not None
    sizes = [one.best.layout.job.batch.micro_batch_size for one in (padded, equal)]
    assert sizes[0] < sizes[1]
    assert padded.best.estimate.peak_bytes > estimate(job(**whole, micro_batch=sizes[0])).peak_bytes
