"""What Megatron-FSDP has beside its shards: whole weights while layers compute, and whole gradients until they are reduced.

Units are the layers; embedding, final norm and head are outside of them and stay gathered once they are. Its queues hold at least
half a billion weights and a billion gradients, more than most models have: the code's cap is a ``max``. So when the final norm is
asked for, all weights that the first queue takes are gathered again.

Source: Megatron-Core 0.16.1, core/distributed/fsdp/src/megatron_fsdp, which runs on fake tensors (``zeroplan verify --engine
megatron --stage 3``). Left out: padding of buckets, double buffers (``--fsdp-double-buffer``), replicas of sharded groups.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.ledger import Kind, Line, Role, Tag
from zeroplan.numeric import Bool, Int, ceil_div, maximum, minimum, where

_FOLDER = "Megatron-Core 0.16.1, core/distributed/fsdp/src/megatron_fsdp"
_GATHERED = f"{_FOLDER}/param_and_grad_buffer.py, AllGatherPipeline.all_gather_params"
_REDUCED = f"{_FOLDER}/param_and_grad_buffer.py, GradReducePipeline.reduce_gradients"
#: Gradients in flight, at the least. Source: megatron_fsdp.py, MegatronFSDP._init_fsdp_param_and_grad_buffer. [elements]
_IN_FLIGHT = 1_000_000_000
#: Points of a step beside the backward of its layers.
AT_AHEAD, AT_LAST, AT_LOSS, AT_HEAD, AT_END, AT_STEP = "ahead", "last", "loss", "head", "end", "step"
_AT_STEP = Tag(Role.UNTIL_NEXT_STEP)


class Sharding(NamedTuple):
    """How a rank's parameters are cut. [elements]"""

    gathers: bool
    """Weights are shards (``optim_grads_params``); else gradients alone are (``optim_grads``)."""
    table: Int
    """The embedding's table."""
    ends: Int
    """The table, final norm and head."""
    layers: tuple[Int, ...]
    """Of every layer, the last one first."""
    shares: tuple[Int, ...]
    """What a rank keeps of the gradients of each layer that are reduced at once."""
    bucket: Int | None
    """Elements at which a bucket outside the layers is closed; ``None``: one for all."""
    width: int
    """Of a weight outside the layers. [bytes]"""
    weights: Int
    """All layers' weights. [bytes]"""
    transposes: Int
    """Transposed copies of a layer's weights in FP8, while it computes. [bytes]"""
    width_of_gradient: int

    def _layer(self) -> Int:
        return maximum(1, _sum(self.layers) // max(1, len(self.layers)))

    def _queue(self) -> Int:
        """Gradients in flight at the most; of weights that are gathered ahead, half of it."""
        return maximum(_IN_FLIGHT, 2 * self._layer()) if self.gathers else _IN_FLIGHT

    def _waiting(self, behind: Int) -> Int:
        """Gradients that wait, of so many behind; the oldest go while they are more than the queue holds, before one is added.

        A bucket of the head alone is the oldest. Padding makes a layer a little more than its elements.
        """
        layer = self._layer() if self.gathers else maximum(1, self.bucket or 1)
        head = where(self._is_cut(), self.ends - self.table, 0)
        beside = (maximum(0, self._queue() - head) // (layer + 1) + 1) * layer
        return where(behind <= beside, behind + head, minimum(behind, (self._queue() // (layer + 1) + 1) * layer))

    def _ahead(self, beside: Int = 0) -> Int:
        """Layers that are gathered before they are asked for, with others beside them."""
        return ceil_div(maximum(0, self._queue() // 2 - beside), self._layer()) * self._layer()

    def _gathered(self, at: str | int) -> Int:
        """Whole weights at a point of the step, or in the backward behind so many layers; those of the loss stay. [bytes]"""
        if not self.gathers:
            return 0
        if at == AT_END:
            return self._weighing(0)
        if at == AT_LAST:
            return self._weighing(self.layers[0]) + self.transposes
        if isinstance(at, int) or at == AT_AHEAD:
            first = at if isinstance(at, int) else 0
            found = minimum(_sum(self.layers[first:]), self.layers[first] + self._ahead())
            return self._weighing(minimum(found, self._unlike_loss()) if at == 0 else found) + self.transposes
        beside = where(self._is_cut(), self.ends - self.table, 0) if at == AT_STEP else 0
        return self._weighing(minimum(_sum(self.layers), self._ahead(beside)))

    def _weighing(self, inside: Int) -> Int:
        """So many elements of layers, and what is outside of them. [bytes]"""
        return self.width * self.ends + inside * self.weights // maximum(1, _sum(self.layers))

    def _unlike_loss(self) -> Int:
        """What the last layer's backward can gather: it lets go of layers from the loss, and those are not gathered ahead."""
        inside = _sum(self.layers)
        return where(inside > self._ahead(), maximum(self.layers[0], inside - self._ahead()), inside)

    def _is_cut(self) -> Bool:
        """Whether the table is a bucket of its own."""
        return self.bucket is not None and self.table >= self.bucket

    def _reduced(self, at: str | int) -> Int:
        """Whole gradients at a point of the backward. A bucket is made whole for the first of its gradients."""
        if at in (AT_AHEAD, AT_LAST, AT_LOSS, AT_STEP):
            return 0
        whole, reaching = self.ends + _sum(self.layers), 0 if self.gathers else self.bucket or 0
        if not self.gathers and self.bucket is None:
            return whole
        if at == AT_HEAD:
            return minimum(whole, where(self._is_cut(), self.ends - self.table, self.ends) + reaching)
        behind = _sum(self.layers if at == AT_END else self.layers[: int(at)])
        if at == AT_END:
            return self._waiting(behind) + where(self._is_cut(), self.table, self.ends)
        return minimum(whole, self._waiting(behind) + where(self._is_cut(), 0, self.ends) + reaching + self.layers[int(at)])

    def backwards(self, kinds: Iterable[int]) -> tuple[int, ...]:
        """Layers that are over where a backward may be highest: some kinds' own, and where a queue is full or nearly empty."""
        last, layer = len(self.layers) - 1, self._layer()
        if not isinstance(layer, int):
            return tuple(range(last + 1))
        full, few = int(self._waiting(_sum(self.layers))) // layer, last - int(self._ahead()) // layer
        return tuple(sorted({*kinds, *(min(max(at, 0), last) for at in (full - 1, full, few, last))}))

    def unread(self) -> Int:
        """Layers whose weights are gathered in a forward that has not come to them, at the most."""
        return minimum(max(0, len(self.layers) - 1), self._ahead() // self._layer()) if self.gathers else 0

    def symbols(self, backwards: Iterable[int]) -> Iterator[Symbol]:
        """Symbols of the lines' formulas."""
        points: tuple[str | int, ...] = AT_AHEAD, AT_LAST, AT_LOSS, AT_HEAD, AT_END, AT_STEP, *backwards
        for at in points:
            when = f"backward behind {at} layers" if isinstance(at, int) else at
            yield Symbol(f"O_{at}", self._gathered(at), f"bytes of whole weights ({when})")
            yield Symbol(f"J_{at}", self._reduced(at), f"parameters whose gradients are whole ({when})")
            if isinstance(at, int):
                yield Symbol(f"I_{at}", self.shares[at], "this rank's share of a layer's gradients that are reduced at once")

    def lines(self, at: str | int) -> tuple[Line, ...]:
        """What is whole at a point of the step. [bytes]"""
        asked = (
            (Kind.UNSHARDED_PARAMETERS, 1, "O", self._gathered(at), "gathered weights", _GATHERED),
            (Kind.UNSHARDED_GRADIENTS, self.width_of_gradient, "J", self._reduced(at), "whole gradients", _REDUCED),
        )
        made = (
            Line(
                kind,
                width * elements,
                what,
                f"{width}·{name}_{at}" if width > 1 else f"{name}_{at}",
                source,
                _AT_STEP if at == AT_STEP else Tag(),
            )
            for kind, width, name, elements, what, source in asked
        )
        return tuple(line for line in made if not (isinstance(line.n_bytes, int) and not line.n_bytes))

    def gathered_per_micro_batch(self, elements: Int) -> tuple[Int, Int]:
        """Of so many elements of the layers, those that a forward and a backward gather."""
        inside = maximum(1, _sum(self.layers))
        again = minimum(inside, self._ahead())
        return elements + elements * again // inside, where(inside > again, elements, 0)

    def share(self, behind: int) -> Line:
        """What a layer's gradients are reduced into. [bytes]"""
        n_bytes, formula = self.width_of_gradient * self.shares[behind], f"{self.width_of_gradient}·I_{behind}"
        return Line(Kind.REDUCE, n_bytes, "this rank's share of gradients, reduced", formula, _REDUCED)


def _sum(numbers: Iterable[Int]) -> Int:
    total: Int = 0
    for one in numbers:
        total = total + one
    return total
