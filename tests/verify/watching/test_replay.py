"""A recording made by hand, replayed on cards of several sizes."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from zeroplan.ledger import Phase
from zeroplan.units import MIB
from zeroplan.verify.watching.recording import STILL_HELD, Block, Recording, Span
from zeroplan.verify.watching.replay import Replays, replay

STEPS = ((0, Phase.FORWARD, 0), (0, Phase.BACKWARD, 4), (0, Phase.STEP, 6), (1, Phase.FORWARD, 6), (1, Phase.STEP, 8))


def recording(*lives: tuple[int, int, int, int]) -> Recording:
    """Make a recording of blocks, each as (MiB, stream, time of the request, time of the release)."""
    blocks = []
    for size, stream, born, died in lives:
        blocks.append(Block(size * MIB, born, "aten.empty", "", 0, stream))
        blocks[-1].died = died
    return Recording(blocks, [Span(*span) for span in STEPS], [], 8)


#: 40 MiB on one stream, then 60 on another, and both again; at most 60 at once.
TURNS = recording((40, 0, 1, 2), (60, 1, 3, 4), (40, 0, 5, 6), (60, 1, 7, 8))
#: 40 MiB are freed and 20 of them taken for good. Then another stream asks for 60, twice.
HELD = recording((40, 0, 1, 2), (20, 0, 3, STILL_HELD), (60, 1, 4, 5), (60, 1, 6, 7))


def test_a_card_that_never_runs_out_keeps_both_streams_blocks():
    shown = replay(TURNS, workspace_bytes=0)
    assert (max(shown.allocated), shown.reserved[-1]) == (60 * MIB, 100 * MIB)


@pytest.mark.parametrize(
    ("room", "fits", "reserved", "retries", "in_last_step", "phase"),
    [
        (100, True, 100, 0, 0, ""),
        (80, True, 60, 3, 1, ""),  # each stream's cached block is freed when the other stream asks
        (50, False, 40, 1, 0, "forward"),
    ],
)
def test_a_full_card_frees_cached_blocks_and_counts_the_retries(
    room: int, fits: bool, reserved: int, retries: int, in_last_step: int, phase: str
):
    found = Replays.of(TURNS, workspace_bytes=0).measured(TURNS, workspace_bytes=0, room_bytes=room * MIB)[0].card
    assert found is not None
    assert (found.fits, found.reserved_bytes, found.room_bytes) == (fits, reserved * MIB, room * MIB)
    assert (found.retries, found.retries_in_last_step, found.phase) == (retries, in_last_step, phase)


def test_the_least_room_is_the_peak_and_what_cannot_be_freed():
    """With default settings a block in use keeps its whole segment reserved, with expandable segments only its own pages."""
    default, expandable = Replays.of(HELD, workspace_bytes=0).measured(HELD, workspace_bytes=0, least_room=True)
    assert default.card is None
    assert default.least_room_bytes == 100 * MIB
    assert expandable.least_room_bytes == 80 * MIB == expandable.allocated_bytes


def test_memory_that_a_script_freed_before_its_first_step_stays_reserved_unless_it_emptied_the_cache():
    loading = replace(recording((40, 0, 1, 2), (60, 1, 3, 4)), spans=[Span(-1, Phase.INIT, 0), Span(0, Phase.FORWARD, 4)])
    script = replace(loading, from_the_start=True)
    emptied = replace(script, emptied=(2,))
    assert [max(replay(one, workspace_bytes=0).reserved) for one in (loading, script, emptied)] == [0, 100 * MIB, 60 * MIB]
