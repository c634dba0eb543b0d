"""Makes snapshots in torch's format, with a small allocator that hands out addresses in order."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from zeroplan.allocator import counted_bytes

if TYPE_CHECKING:
    from pathlib import Path

TORCH = "/env/site-packages/torch"
MODULE = [("/home/me/train.py", "main", 3), (f"{TORCH}/nn/modules/module.py", "_apply", 900)]
FORWARD = [
    ("/home/me/train.py", "main", 7),
    (f"{TORCH}/nn/modules/module.py", "_call_impl", 1),
    ("/home/me/model.py", "forward", 21),
]
LOSS = [*FORWARD, (f"{TORCH}/nn/functional.py", "cross_entropy", 30)]
AUTOGRAD: list[tuple[str, str, int]] = []  # autograd's thread has no Python frames
CPP_BACKWARD = [
    ("??", "torch::autograd::Engine::thread_main(x)", 0),
    ("??", "torch::autograd::generated::MmBackward0::apply(x)", 0),
]
STEP = [("/home/me/train.py", "main", 9), (f"{TORCH}/optim/adamw.py", "step", 80)]
RECOMPUTED = [(f"{TORCH}/utils/checkpoint.py", "unpack_hook", 5), *FORWARD]
GATHER = [*FORWARD, (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather", 200)]


class Written:
    """An allocator that records its events. Stacks are given with the outermost frame first."""

    def __init__(self) -> None:
        self.trace: list[dict[str, object]] = []
        self.in_use: dict[int, dict[str, object]] = {}
        self._next = 0x7F00_0000_0000

    def ask(self, n_bytes: int, stack: list[tuple[str, str, int]]) -> int:
        address, self._next = self._next, self._next + 2**32
        entry = {"action": "alloc", "addr": address, "size": n_bytes, "stream": 0, "time_us": 10, "frames": _frames(stack)}
        self.trace.append(entry)
        self.in_use[address] = entry
        return address

    def release(self, address: int) -> None:
        size = self.in_use.pop(address)["size"]
        for action in ("free_requested", "free_completed"):
            self.trace.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": 10, "frames": []})

    def fail(self, n_bytes: int, stack: list[tuple[str, str, int]], *, left: int) -> None:
        self.trace.append(
            {"action": "oom", "device_free": left, "size": n_bytes, "stream": 0, "time_us": 10, "frames": _frames(stack)}
        )

    def forget(self, events: int) -> None:
        """Drop the first events of the history, as a ring buffer does. Blocks still in use lose their stack."""
        lost = {id(entry) for entry in self.trace[:events]}
        self.trace = self.trace[events:]
        for entry in self.in_use.values():
            if id(entry) in lost:
                entry["frames"] = []

    def data(self, *, idle: tuple[int, ...] = ()) -> dict[str, object]:
        """Return the snapshot. ``idle`` are sizes of reserved blocks that are free. [bytes]"""
        blocks = [(entry["size"], "active_allocated", entry["frames"], entry["addr"]) for entry in self.in_use.values()]
        blocks += [(size, "inactive", [], 1 + at) for at, size in enumerate(idle)]
        segments = [
            {
                "device": 0, "address": address, "total_size": counted_bytes(size), "is_expandable": False,
                "blocks": [
                    {"address": address, "size": counted_bytes(size), "requested_size": size, "state": state, "frames": frames}
                ],
            }
            for size, state, frames, address in blocks
        ]  # fmt: skip
        return {"segments": segments, "device_traces": [self.trace]}

    def to(self, path: Path, *, idle: tuple[int, ...] = ()) -> Path:
        path.write_bytes(pickle.dumps(self.data(idle=idle)))
        return path


def _frames(stack: list[tuple[str, str, int]]) -> list[dict[str, object]]:
    return [{"filename": file, "name": name, "line": line} for file, name, line in reversed(stack)]


def step(card: Written, *, states: bool, backward: list[tuple[str, str, int]] = AUTOGRAD) -> None:
    """Take a training step of a model with one weight of 4,000 bytes: activations, logits, a gradient, Adam's two states."""
    scratch = card.ask(300, FORWARD)
    kept = card.ask(5_000, FORWARD)
    card.release(scratch)
    logits = card.ask(9_000, LOSS)
    passing = card.ask(700, backward)
    gradient = card.ask(4_000, backward)
    for address in (passing, logits, kept):
        card.release(address)
    if states:
        card.ask(4_000, STEP)
        card.ask(4_000, STEP)
    denominator = card.ask(3_999, STEP)
    card.release(denominator)
    card.release(gradient)
