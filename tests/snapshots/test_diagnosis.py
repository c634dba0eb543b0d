"""What held the memory at the peak or when it ran out: blocks get their kind from their lifetime and their stack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.snapshots.written import (
    AUTOGRAD,
    CPP_BACKWARD,
    FORWARD,
    GATHER,
    LOSS,
    MODULE,
    RECOMPUTED,
    STEP,
    TORCH,
    Written,
    step,
)
from zeroplan.ledger import Kind
from zeroplan.report.diagnosis import diagnosis_payload, diagnosis_text
from zeroplan.snapshots.diagnosis import Diagnosis, diagnose
from zeroplan.snapshots.kinds import UNKNOWN
from zeroplan.snapshots.lives import BEFORE, alive, lives_of
from zeroplan.snapshots.reading import Event, Segment, Snapshot, Standing, read_snapshot
from zeroplan.snapshots.replayed import replayed
from zeroplan.units import MIB

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def card() -> Written:
    made = Written()
    made.ask(4_000, MODULE)
    return made


def found(card: Written, folder: Path, *, idle: tuple[int, ...] = ()) -> Diagnosis:
    return diagnose(read_snapshot(card.to(folder / "snapshot.pickle", idle=idle)))


def kinds(found: Diagnosis) -> dict[str, int]:
    return {held.kind: held.n_bytes for held in found.held}


@pytest.mark.parametrize("backward", [AUTOGRAD, CPP_BACKWARD], ids=["frames of Python", "frames of C++ too"])
def test_the_highest_moment_of_a_step_is_sorted_into_kinds(card: Written, tmp_path: Path, backward: list[tuple[str, str, int]]):
    step(card, states=True, backward=backward)
    step(card, states=False, backward=backward)
    seen = found(card, tmp_path)
    assert kinds(seen) == {
        Kind.LOGITS: 9_000, Kind.OPTIMIZER_STATE: 8_000, Kind.ACTIVATIONS: 5_000, Kind.PARAMETERS: 4_000, Kind.GRADIENTS: 4_000,
        Kind.TEMPORARY: 700,
    }  # fmt: skip
    assert (seen.live_bytes, seen.part, seen.failure) == (sum(kinds(seen).values()), "backward", None)


def test_what_a_forward_alone_leaves_is_activations(card: Written, tmp_path: Path):
    card.release(card.ask(300, FORWARD))
    card.ask(5_000, FORWARD)
    assert kinds(found(card, tmp_path)) == {Kind.PARAMETERS: 4_000, Kind.ACTIVATIONS: 5_000}


def test_what_the_step_allocates_and_frees_is_its_temporaries(card: Written, tmp_path: Path):
    gradient = card.ask(4_000, AUTOGRAD)
    card.ask(8_000, STEP)
    scratch = card.ask(50_000, STEP)
    card.release(scratch)
    card.release(gradient)
    assert kinds(found(card, tmp_path)) == {
        Kind.PARAMETERS: 4_000, Kind.GRADIENTS: 4_000, Kind.OPTIMIZER_STATE: 8_000, Kind.OPTIMIZER_TEMPORARY: 50_000,
    }  # fmt: skip


def test_an_engines_own_function_says_what_its_buffer_is_for(card: Written, tmp_path: Path):
    card.release(card.ask(10_000, GATHER))
    assert kinds(found(card, tmp_path)) == {Kind.PARAMETERS: 4_000, Kind.GATHER: 10_000}


def test_recomputed_tensors_are_activations(card: Written, tmp_path: Path):
    card.ask(100, FORWARD)
    again = card.ask(20_000, RECOMPUTED)
    card.ask(4_000, AUTOGRAD)
    card.release(again)
    assert kinds(found(card, tmp_path))[Kind.ACTIVATIONS] == 20_100


def test_a_workspace_of_cublas_is_known_by_its_size_and_because_it_stays(card: Written, tmp_path: Path):
    card.ask(32 * MIB, FORWARD)
    card.release(card.ask(32 * MIB, FORWARD))
    assert kinds(found(card, tmp_path)) == {Kind.PARAMETERS: 4_000, Kind.WORKSPACE: 32 * MIB, Kind.TEMPORARY: 32 * MIB}


def test_blocks_that_stay_only_because_memory_ran_out_are_no_workspace(card: Written, tmp_path: Path):
    card.ask(32 * MIB, FORWARD)
    step(card, states=True)
    kept = [card.ask(32 * MIB, FORWARD) for _ in range(3)]
    card.fail(32 * MIB, FORWARD, left=1_000)
    seen = kinds(found(card, tmp_path))
    assert seen[Kind.WORKSPACE] == 32 * MIB
    assert seen[Kind.ACTIVATIONS] == len(kept) * 32 * MIB


def test_blocks_from_before_the_history_are_inferred_from_its_end(card: Written, tmp_path: Path):
    """Blocks that the ring buffer lost have no stack. A parameter and its states have a gradient's size; the rest is unknown."""
    card.ask(77, MODULE)
    step(card, states=True)
    card.forget(len(card.trace))
    step(card, states=False)
    seen = found(card, tmp_path)
    assert kinds(seen)[Kind.PARAMETERS] == kinds(seen)[Kind.GRADIENTS] == 4_000
    assert kinds(seen)[Kind.OPTIMIZER_STATE] == 8_000
    assert kinds(seen)[UNKNOWN] == 77
    assert seen.before_bytes == 4_000 + 77 + 8_000


def test_live_bytes_counted_backwards_equal_those_counted_forwards(card: Written, tmp_path: Path):
    step(card, states=True)
    lives = lives_of(read_snapshot(card.to(tmp_path / "snapshot.pickle")))
    total, forwards = 0, [0]
    for entry in card.trace:
        if entry["action"] in ("alloc", "free_requested"):
            total += entry["size"] if entry["action"] == "alloc" else -entry["size"]  # type: ignore[operator]
            forwards.append(total)
    assert list(lives.live_bytes) == forwards
    assert [sum(life.n_bytes for life in alive(lives, at)) for at in range(BEFORE, len(forwards) - 1)] == forwards


def test_out_of_memory_names_the_request_its_caller_and_what_held_the_memory(card: Written, tmp_path: Path):
    step(card, states=True)
    card.ask(5_000, FORWARD)
    card.fail(60_000, LOSS, left=1_000)
    seen = found(card, tmp_path)
    assert seen.failure is not None
    assert seen.failure[:3] == (60_000, 1_000, (4096 - 4000) + (8192 - 8000) + (5120 - 5000))
    assert kinds(seen)[Kind.ACTIVATIONS] == 5_000
    said = diagnosis_text(seen, where="it.pickle")
    assert "Out of memory: 58.59 KiB = 60.00 kB were requested by model.py:21 forward, in the forward" in said
    assert said.endswith("57.22 KiB = 58.59 kB more were needed, beyond all reserved memory that was free.")


def test_the_text_says_if_the_peak_is_outside_a_step(card: Written, tmp_path: Path):
    card.ask(5_000, [("/home/me/train.py", "evaluate", 3)])
    said = diagnosis_text(found(card, tmp_path), where="it.pickle")
    assert "in use, last allocated outside a step" in said


def test_fragmented_room_is_distinguished_from_no_room(card: Written, tmp_path: Path):
    card.fail(60_000, FORWARD, left=1_000)
    said = diagnosis_text(found(card, tmp_path, idle=(40_000, 30_000)), where="it.pickle")
    assert "69.09 KiB = 70.75 kB were reserved and free, but no single piece was large enough" in said
    assert "expandable_segments:True" in said


def test_a_snapshot_without_stacks_says_what_is_missing(card: Written, tmp_path: Path):
    card.forget(1)
    said = diagnosis_text(found(card, tmp_path), where="it.pickle")
    assert UNKNOWN in said
    assert "_record_memory_history" in said


def test_the_json_has_the_kinds_of_the_diagnosis(card: Written, tmp_path: Path):
    step(card, states=True)
    seen = found(card, tmp_path)
    data = json.loads(json.dumps(diagnosis_payload(seen, where="it.pickle")))
    assert {one["kind"]: one["bytes"] for one in data["held"]} == kinds(seen)
    assert data["held"][0]["sites"][0] == {"where": "model.py:21 forward", "n_bytes": 9_000}
    assert data["live_bytes"] == sum(kinds(seen).values())


def test_torchs_wrapper_marks_the_step_of_any_optimizer(card: Written, tmp_path: Path):
    """A user's own optimizer is known by ``Optimizer.profile_hook_step``. ``zero_grad`` is no step."""
    wrapper = [("/home/me/train.py", "main", 9), (f"{TORCH}/optim/optimizer.py", "wrapper", 500), ("/home/me/mine.py", "go", 5)]
    zeroed = [("/home/me/train.py", "main", 8), (f"{TORCH}/optim/optimizer.py", "zero_grad", 900)]
    step(card, states=False)
    card.ask(6_000, wrapper)
    card.release(card.ask(50_000, zeroed))
    seen = kinds(found(card, tmp_path))
    assert seen[Kind.ACTIVATIONS] == 50_000
    card.release(card.ask(70_000, wrapper))
    seen = kinds(found(card, tmp_path))
    assert (seen[Kind.OPTIMIZER_STATE], seen[Kind.OPTIMIZER_TEMPORARY]) == (6_000, 70_000)


def test_a_workspace_of_cublas_is_known_by_its_own_functions_whatever_its_size(card: Written, tmp_path: Path):
    card.ask(12_345, [*FORWARD, ("??", "at::cuda::getCurrentCUDABlasHandle()", 0)])
    card.release(card.ask(50_000, FORWARD))
    assert kinds(found(card, tmp_path))[Kind.WORKSPACE] == 12_345


def test_more_blocks_of_a_gradients_size_than_it_can_have_are_unknown(card: Written, tmp_path: Path):
    """A parameter and two states have a gradient's size. A fourth such block, from before the history, could be anything."""
    card.ask(4_000, MODULE)
    step(card, states=True)
    card.forget(len(card.trace))
    step(card, states=False)
    seen = kinds(found(card, tmp_path))
    assert (seen[Kind.PARAMETERS], seen[Kind.OPTIMIZER_STATE], seen[UNKNOWN]) == (4_000, 8_000, 4_000)


def test_a_history_with_holes_is_not_replayed(card: Written, tmp_path: Path):
    """A block crosses the end of its segment, where no allocator puts one."""
    path = card.to(tmp_path / "snapshot.pickle")
    whole = read_snapshot(path)
    card.forget(len(card.trace))
    standing = read_snapshot(card.to(path))
    assert replayed(whole, lives_of(whole)) is not None
    assert replayed(standing, lives_of(standing)) is not None
    torn = standing._replace(segments=tuple(one._replace(n_bytes=512) for one in standing.segments))
    assert replayed(torn, lives_of(torn)) is None


def test_the_unsplit_rest_of_an_older_block_belongs_to_it():
    """Between both blocks are 0.5 MiB that must belong to the first, so that 17.5 MiB fit where the first one was."""
    piece, first = MIB // 2, 17 * MIB
    asked = [(first + piece, 5 * piece, "requested"), (0, first, "released"), (0, first + piece, "requested")]
    events = tuple(Event(action, address, n_bytes, (), 10, 0) for address, n_bytes, action in asked)
    standing = tuple(Standing(address, n_bytes, ()) for address, n_bytes, _ in (asked[0], asked[2]))
    whole = Snapshot(0, events, standing, (Segment(0, 20 * MIB, 0),), 20 * MIB, 0, expandable_segments=False, steps=())
    found = replayed(whole, lives_of(whole))
    assert found is not None
    assert (found.requests, found.alike, found.reserved_bytes) == (2, 2, 20 * MIB)
