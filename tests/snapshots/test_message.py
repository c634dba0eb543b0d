"""Torch's out-of-memory message: the wording of every release is read, and the request that failed is found."""

from __future__ import annotations

import pytest

from zeroplan import SpecError, estimate, job
from zeroplan.allocator import segment_bytes
from zeroplan.replay import Full, StepReplay
from zeroplan.snapshots.message import as_torch_prints, read_message
from zeroplan.snapshots.request_of_message import request_of
from zeroplan.units import GIB, MIB

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of which "
    "12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the allocated memory 9.08 GiB "
    "is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large"
)
OF_2_0 = (
    "CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 GiB already allocated; 0 bytes free; "
    "19.15 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory"
)
OF_1_4 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already allocated; "
    "9.28 GiB free; 4.68 MiB cached)"
)
OF_2_1 = (
    "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes is free. Of the "
    "allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated."
)
GRAPHS = (
    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 39.49 GiB of which 20.00 MiB is free. Process "
    "7 has 8.00 GiB memory in use. Including non-PyTorch memory, this process has 31.40 GiB memory in use. Of the allocated memory "
    "30.00 GiB is allocated by PyTorch, with 512.00 MiB allocated in private pools (e.g., CUDA Graphs), and 600.00 MiB is reserved "
    "by PyTorch but unallocated."
)


def gib(number: float) -> int:
    return round(number * GIB)


@pytest.mark.parametrize(("text", "read"), [
    (NEW, (gib(22.78), gib(31.47), gib(12.73), gib(9.08), gib(9.35), gib(18.73))),
    (OF_2_0, (gib(10.73), gib(8), 0, gib(17.20), gib(19.15) - gib(17.20), None)),
    (OF_1_4, (round(12.5 * MIB), gib(10.92), gib(9.28), round(8.57 * MIB), 0, None)),
    (OF_2_1, (gib(1.70), gib(6), 0, gib(2.93), gib(2.30), None)),
    (GRAPHS, (64 * MIB, gib(39.49), 20 * MIB, gib(30), 600 * MIB, gib(31.40))),
], ids=["2.13", "2.0", "1.4", "2.1", "graphs"])  # fmt: skip
def test_every_release_is_read(text: str, read: tuple[int | None, ...]):
    said = read_message(f"step 3\n{text}\nan earlier line", where="a log")
    found = (
        said.tried_bytes,
        said.capacity_bytes,
        said.free_bytes,
        said.allocated_bytes,
        said.unallocated_bytes,
        said.in_use_bytes,
    )
    assert found == read


def test_the_last_message_is_read_even_with_broken_lines():
    broken = NEW.replace(" of which ", "\n   of which ").replace(" Of the ", "\nOf the ")
    assert read_message(f"{OF_2_1}\n{broken}", where="a log").tried_text == "22.78 GiB"
    said = read_message(GRAPHS, where="a log")
    assert (said.private_bytes, said.others_bytes) == (512 * MIB, gib(39.49) - 20 * MIB - gib(31.40))


@pytest.mark.parametrize(("text", "why"), [
    ("", "no line 'CUDA out of memory"), ("Killed", "no snapshot"), (NEW[:120], "no free"), (OF_2_0[:70], "no capacity"),
])  # fmt: skip
def test_text_without_a_message_is_refused_in_one_line(text: str, why: str):
    with pytest.raises(SpecError, match=why) as refused:
        read_message(text, where="a log")
    assert "\n" not in str(refused.value)


JOBS = {
    "fsdp2": {"stage": 3, "seq_len": 4096},
    "fsdp2, recomputed": {"stage": 2, "recompute": "full", "micro_batch": 2, "seq_len": 2048},
    "ddp": {"stage": 0, "seq_len": 1024},
    "deepspeed 2": {"stage": 2, "engine": "deepspeed", "seq_len": 2048},
}


@pytest.mark.parametrize("asked", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("part", [0.55, 0.8, 0.97])
def test_the_request_that_fails_on_a_smaller_card_is_found_by_its_message(asked: dict[str, object], part: float):
    answer = estimate(job(model="llama-3.2-1b", gpus=8, gpu="h100", **asked))  # type: ignore[arg-type]
    replay = StepReplay(answer.job)
    room = round(part * answer.peak_bytes)
    full = replay.full_at(room)
    assert full is not None
    said = read_message(written(replay, full, room), where="a log")
    found = request_of(said, answer)
    assert found is not None
    one = replay.log.requests[replay.log.events[full.at]]
    span = [span for span in replay.log.spans if span.start <= full.at][-1]
    assert (found.kind, found.n_bytes, found.phase, found.step) == (one.kind.value, one.n_bytes, span.phase.value, span.step)
    assert found.replayed
    far = said._replace(unallocated_bytes=said.unallocated_bytes + 4 * answer.peak_bytes)  # the replay does not run out there
    nearest = request_of(far, answer)
    assert nearest is not None
    assert not nearest.replayed


def written(replay: StepReplay, full: Full, room: int) -> str:
    """Return torch's message, with two digits, for a GPU that has ``room`` bytes for the allocator."""
    tried = as_torch_prints(segment_bytes(replay.log.requests[replay.log.events[full.at]].n_bytes))
    return (
        f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {as_torch_prints(room)} of which "
        f"{as_torch_prints(room - full.reserved_bytes)} is free. Of the allocated memory {as_torch_prints(full.allocated_bytes)} "
        f"is allocated by PyTorch, and {as_torch_prints(full.reserved_bytes - full.allocated_bytes)} is reserved by PyTorch but "
        "unallocated."
    )
