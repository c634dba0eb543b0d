"""Simulates an engine's step on two streams: the GPU's computing, and a network that carries one call after the other.

Under FSDP each block is gathered while the one before it computes, and its gradients are reduced while the next one computes
(torch 2.13, ``_fsdp_param_group.py``). A gather begins once the block before has begun. A reduction begins once its block and
the reduction before have ended; computing waits for the latter. While the network is busy, computing lacks NCCL's SMs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Unit(NamedTuple):
    """Times of one block, or of the root. [s]"""

    forward: float
    backward: float
    gather: float
    gather_again: float
    reduce: float


@dataclass
class Streams:
    """Two streams, and the time at which each is next free. [s]"""

    taken: float
    computed: float = 0.0
    sent: float = 0.0
    busy: list[tuple[float, float]] = field(default_factory=list)

    def send(self, issued: float, takes: float) -> float:
        """Carry a call after those before it and not before it is issued; return its end."""
        begins = max(self.sent, issued)
        self.sent = begins + takes
        if takes:
            self.busy.append((begins, self.sent))
        return self.sent

    def compute(self, ready: float, takes: float) -> float:
        """Compute for ``takes``, longer while a call is being sent; return the end. Calls that are issued later do not count."""
        at, left = max(self.computed, ready), takes
        for begins, ends in self.busy:
            if ends <= at:
                continue
            alone = max(0.0, min(left, begins - at))
            at, left = at + alone, left - alone
            beside = min(left, (ends - max(at, begins)) * (1.0 - self.taken)) if at >= begins else 0.0
            at, left = at + beside / (1.0 - self.taken), left - beside
        self.computed = at + left
        return self.computed


def micro_batch(streams: Streams, root: Unit, blocks: list[Unit], head: Unit) -> None:
    """Simulate one micro-batch of FSDP: the root is gathered once, a block once per pass."""
    ready = streams.send(streams.computed, root.gather)
    ready = streams.send(ready, blocks[0].gather)
    for at, block in enumerate(blocks):
        begins = max(streams.computed, ready)
        ready = streams.send(begins, blocks[at + 1].gather) if at + 1 < len(blocks) else ready
        streams.compute(begins, block.forward)
    streams.compute(0.0, head.forward)
    ready = streams.send(streams.computed, blocks[-1].gather_again)
    streams.compute(0.0, head.backward)
    reduced = 0.0
    for at in reversed(range(len(blocks))):
        begins = max(streams.computed, ready)
        ready = streams.send(begins, blocks[at - 1].gather_again) if at else ready
        ended = streams.compute(begins, blocks[at].backward)
        streams.computed = max(ended, reduced)
        reduced = streams.send(streams.computed, blocks[at].reduce)
    streams.computed = max(streams.computed, streams.send(streams.computed, root.reduce), reduced)


class Piece(NamedTuple):
    """The part of a backward that ends when a bucket is full, and the time of its reduction. [s]"""

    backward: float
    reduce: float


def in_buckets(streams: Streams, forward: float, pieces: list[Piece], *, waits: bool) -> None:
    """Simulate one micro-batch of DDP, or of DeepSpeed at stages 1 and 2: each bucket is reduced once it is full.

    ``waits``: computing waits for the reduction before it (DeepSpeed 0.19.8, ``stage_1_and_2.py``, ``average_tensor``).
    """
    streams.compute(0.0, forward)
    reduced = 0.0
    for piece in pieces:
        streams.compute(0.0, piece.backward)
        if piece.reduce:
            streams.computed = max(streams.computed, reduced) if waits else streams.computed
            reduced = streams.send(streams.computed, piece.reduce)
    streams.computed = max(streams.computed, streams.sent)


class Module(NamedTuple):
    """What ZeRO-3 gathers at once: the embedding, a block or the head. ``flushes``: times of the reductions that it fills. [s]"""

    forward: float
    backward: float
    gather: float
    gather_again: float
    flushes: tuple[float, ...] = ()


def of_stage_3(streams: Streams, modules: list[Module]) -> None:
    """Simulate one micro-batch of DeepSpeed's stage 3. The host issues all gathers of a forward ahead, of a backward one ahead.

    Calls go out in the order in which the host issues them. Two reductions may be under way (DeepSpeed 0.19.8, ``stage3.py``,
    ``max_param_reduce_events``).
    """
    ready = [streams.send(0.0 if at else streams.computed, one.gather) for at, one in enumerate(modules)]
    for there, one in zip(ready, modules, strict=True):
        streams.compute(there, one.forward)
    order = list(reversed(modules))
    there, reduced = [streams.computed], [0.0, 0.0]
    for at, one in enumerate(order):
        if at + 1 < len(order):
            there.append(streams.send(0.0, order[at + 1].gather_again))
        streams.compute(there[at], one.backward)
        for flush in one.flushes:
            streams.computed = max(streams.computed, reduced[-2])
            reduced.append(streams.send(streams.computed, flush))
    streams.computed = max(streams.computed, streams.sent)
