"""What does Megatron-FSDP hold beyond its shards: gathered weights while layers compute, and whole gradients until it reduces them?

Each layer is an FSDP unit. Embedding, final norm and head are outside the units and stay gathered after their first use. The queue
of weights takes at least half a billion, the queue of gradients at least a billion: the code limits them with ``max``, not ``min``.
Most models have fewer. So when the final norm needs its weights, Megatron-FSDP gathers the last layers again, as many as the queue
takes.

Source: Megatron-Core 0.16.1, core/distributed/fsdp/src/megatron_fsdp, which runs on fake tensors (``zeroplan verify --engine
megatron --stage 3``). Left out: double buffers (``--fsdp-double-buffer``), replicas of sharded groups.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.megatron.buckets import bucket_of, padded_ends, padded_layer
from zeroplan.engines.megatron.parameters import GRADIENTS_TOO, WEIGHTS_TOO, bytes_of, ends_of, table_of
from zeroplan.engines.megatron.rank import Rank, expert_sharers, sharers, updated_by
from zeroplan.ledger import Kind, Line, Role, Tag
from zeroplan.numeric import Bool, Int, added_up, ceil_div, maximum, minimum, share_of, where
from zeroplan.spec.described import Job

_FOLDER = "Megatron-Core 0.16.1, core/distributed/fsdp/src/megatron_fsdp"
_GATHERED = f"{_FOLDER}/param_and_grad_buffer.py, AllGatherPipeline.all_gather_params"
_REDUCED = f"{_FOLDER}/param_and_grad_buffer.py, GradReducePipeline.reduce_gradients"
#: The smallest limit of gradients in flight. Source: megatron_fsdp.py, MegatronFSDP._init_fsdp_param_and_grad_buffer. [elements]
_IN_FLIGHT = 1_000_000_000
#: Points of a step, other than the backward of each layer.
AT_AHEAD, AT_LAST, AT_LOSS, AT_HEAD, AT_END, AT_STEP = "ahead", "last", "loss", "head", "end", "step"
_AT_STEP = Tag(Role.UNTIL_NEXT_STEP)


class Sharding(NamedTuple):
    """How Megatron-FSDP shards a rank's parameters. [elements]"""

    gathers: bool
    """Whether weights are sharded and gathered (``optim_grads_params``). Otherwise they are whole (``optim_grads``)."""
    table: Int
    """The embedding's table."""
    ends: Int
    """The parameters outside the layers: embedding, final norm and head."""
    layers: tuple[Int, ...]
    """The parameters of every layer, the last layer first."""
    beside: tuple[Int, ...]
    """Those of them outside experts, if the layer has experts with a bucket of their own; else 0."""
    shares: tuple[Int, ...]
    """A rank's share of the gradients of each layer that one reduce-scatter reduces."""
    bucket: Int | None
    """Elements at which a bucket outside the units is closed; ``None``: one bucket for all."""
    width: int
    """Size of a weight outside the layers. [bytes]"""
    weights: Int
    """Size of all layers' weights. [bytes]"""
    transposes: Int
    """Transposed FP8 copies of a layer's weights while the layer computes. [bytes]"""
    width_of_gradient: int
    """Size of a gradient. [bytes]"""

    @property
    def _bucket(self) -> Int:
        return 0 if self.bucket is None else self.bucket

    def _layer(self) -> Int:
        return maximum(1, added_up(self.layers) // max(1, len(self.layers)))

    def _queue(self) -> Int:
        """Return the most gradients in flight. Half as many weights are gathered ahead. [elements]"""
        return maximum(_IN_FLIGHT, 2 * self._layer()) if self.gathers else _IN_FLIGHT

    def _waiting(self, behind: Int) -> Int:
        """Return the gradients that wait for their reduction, after ``behind`` gradients of layers. [elements]

        Before Megatron-FSDP adds a bucket, it reduces the oldest ones until the queue holds no more than its limit. If the head has
        a bucket of its own, this is the oldest. Padding makes a layer a little larger than its elements.
        """
        layer = self._layer() if self.gathers else maximum(1, self._bucket)
        head = where(self._is_cut(), self.ends - self.table, 0)
        beside = (maximum(0, self._queue() - head) // (layer + 1) + 1) * layer
        return where(behind <= beside, behind + head, minimum(behind, (self._queue() // (layer + 1) + 1) * layer))

    def _ahead(self, beside: Int = 0) -> Int:
        """Return the weights of layers that are gathered ahead. ``beside``: other weights in the queue. [elements]"""
        return ceil_div(maximum(0, self._queue() // 2 - beside), self._layer()) * self._layer()

    def _gathered(self, at: str | int) -> Int:
        """Return the gathered weights at a point of the step. [bytes]

        ``at``: one of the points, or the number of layers whose backward has run. Weights gathered at the loss stay gathered.
        """
        if not self.gathers:
            return 0
        if at == AT_END:
            return self._weighing(0)
        if at == AT_LAST:
            return self._weighing(self.layers[0]) + self.transposes
        if isinstance(at, int) or at == AT_AHEAD:
            first = at if isinstance(at, int) else 0
            found = minimum(added_up(self.layers[first:]), self.layers[first] + self._ahead())
            return self._weighing(minimum(found, self._unlike_loss()) if at == 0 else found) + self.transposes
        beside = where(self._is_cut(), self.ends - self.table, 0) if at == AT_STEP else 0
        return self._weighing(minimum(added_up(self.layers), self._ahead(beside)))

    def _weighing(self, inside: Int) -> Int:
        """Return the size of ``inside`` weights of layers and of all weights outside them. [bytes]"""
        return self.width * self.ends + share_of(self.weights, inside, maximum(1, added_up(self.layers)))

    def _unlike_loss(self) -> Int:
        """Return the layers' weights that can be whole in the last layer's backward. [elements]

        That backward releases layers gathered at the loss, and Megatron-FSDP does not gather those ahead.
        """
        inside = added_up(self.layers)
        return where(inside > self._ahead(), maximum(self.layers[0], inside - self._ahead()), inside)

    def _is_cut(self) -> Bool:
        """Whether the embedding's table has a bucket of its own."""
        return self.bucket is not None and self.table >= self.bucket

    def _reduced(self, at: str | int) -> Int:
        """Return the whole gradients at a point of the step. [elements]

        The first gradient of a bucket allocates the whole bucket.
        """
        if at in (AT_AHEAD, AT_LAST, AT_LOSS, AT_STEP):
            return 0
        whole, reaching = self.ends + added_up(self.layers), 0 if self.gathers else self._bucket
        if not self.gathers and self.bucket is None:
            return whole
        if at == AT_HEAD:
            return minimum(whole, where(self._is_cut(), self.ends - self.table, self.ends) + reaching)
        behind = added_up(self.layers if at == AT_END else self.layers[: int(at)])
        if at == AT_END:
            return self._waiting(behind) + where(self._is_cut(), self.table, self.ends)
        return minimum(whole, self._waiting(behind) + where(self._is_cut(), 0, self.ends) + reaching + self.layers[int(at)])

    def backwards(self, kinds: Iterable[int], together: int) -> tuple[int, ...]:
        """Return the points at which the backward may peak, each as the number of layers whose backward has run.

        These are ``kinds`` (the last layer of each kind), the first and the last layer, and the points where whole weights and
        gradients begin to grow or fall differently. Between them the memory of all other tensors falls evenly, or with each
        checkpoint of ``together`` layers.
        """
        last = len(self.layers) - 1
        if not isinstance(self._layer(), int):
            return tuple(range(last + 1))
        whole = [self._gathered(at) + self.width_of_gradient * self._reduced(at) for at in range(last + 1)]
        bends = (at for at in range(1, last) if whole[at + 1] - whole[at] != whole[at] - whole[at - 1])
        near = {at + step for at in (*kinds, 0, *bends, last) for step in range(1 - together, together)}
        return tuple(sorted(near & {*range(last + 1)}))

    def unread(self) -> Int:
        """Return the most layers that are gathered ahead in a forward that has not run them yet."""
        return minimum(max(0, len(self.layers) - 1), self._ahead() // self._layer()) if self.gathers else 0

    def symbols(self, backwards: Iterable[int]) -> Iterator[Symbol]:
        """Yield the symbols in the formulas of the lines."""
        points: tuple[str | int, ...] = AT_AHEAD, AT_LAST, AT_LOSS, AT_HEAD, AT_END, AT_STEP, *backwards
        for at in points:
            when = f"backward behind {at} layers" if isinstance(at, int) else at
            yield Symbol(f"O_{at}", self._gathered(at), f"bytes of whole weights ({when})")
            yield Symbol(f"J_{at}", self._reduced(at), f"parameters whose gradients are whole ({when})")
            if isinstance(at, int):
                yield Symbol(f"K_{at}", self.beside[at], "parameters of the layer that runs backward, beside its experts")
                yield Symbol(f"I_{at}", self.shares[at], "this rank's share of a layer's gradients that are reduced at once")

    def lines(self, at: str | int) -> tuple[Line, ...]:
        """Return the lines of whole weights and gradients at a point of the step. [bytes]"""
        buffers = (
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
            for kind, width, name, elements, what, source in buffers
        )
        return tuple(line for line in made if not (isinstance(line.n_bytes, int) and not line.n_bytes))

    def lines_in_experts(self, behind: int) -> tuple[Line, ...]:
        """Return the lines while the layer's experts run backward, before the rest of the layer has gradients. [bytes]"""
        width, made = self.width_of_gradient, self._reduced(behind) - self.beside[behind]
        formula = f"{width}·(J_{behind} - K_{behind})"
        return tuple(
            line._replace(n_bytes=width * made, formula=formula) if line.kind is Kind.UNSHARDED_GRADIENTS else line
            for line in self.lines(behind)
        )

    def gathered_per_micro_batch(self, elements: Int) -> tuple[Int, Int]:
        """Return how many of the layers' ``elements`` the forward and the backward of a micro-batch gather."""
        inside = maximum(1, added_up(self.layers))
        again = minimum(inside, self._ahead())
        return elements + share_of(elements, again, inside), where(inside > again, elements, 0)

    def share(self, behind: int) -> Line:
        """Return the line of the tensor into which a layer's gradients are reduced. [bytes]"""
        n_bytes, formula = self.width_of_gradient * self.shares[behind], f"{self.width_of_gradient}·I_{behind}"
        return Line(Kind.REDUCE, n_bytes, "this rank's share of gradients, reduced", formula, _REDUCED)


def sharding_of(rank: Rank, job: Job) -> Sharding | None:
    """Return how Megatron-FSDP shards a rank's parameters; None below stage 2.

    It cannot shard experts that only one rank has.
    """
    recipe = job.recipe
    if recipe.zero_stage < GRADIENTS_TOO:
        return None
    units, besides, shares = list[Int](), list[Int](), list[Int]()
    several, of_experts = sharers(job), expert_sharers(job)
    for at, layers in enumerate(rank.counts):
        beside, experts, _ = padded_layer(job, at, sharers=several, expert_sharers=of_experts)
        shares += [maximum(ceil_div(beside, several), ceil_div(experts, of_experts))] * layers
        units += [beside + where(of_experts > 1, experts, 0)] * layers
        besides += [where((of_experts > 1) & (experts > 0), beside, 0)] * layers
    bucket, (embedding, end), width = bucket_of(job), ends_of(job), bytes_of(recipe)
    table, others = padded_ends(job, table_of(job), embedding + end - table_of(job), several)
    if recipe.zero_stage < WEIGHTS_TOO:  # shares of small buckets are not counted; a single bucket is reduced at the end
        shares = [updated_by(rank, job)[0] if bucket is None else 0, *[0] * (len(units) - 1)]
    weights: Int = width.weight * sum(units)
    if recipe.megatron.fp8_param_gather:
        weights = weights - (width.weight - 1) * rank.in_fp8
    transposes = ceil_div(rank.in_fp8, max(1, len(units))) if recipe.megatron.fp8_transposes else 0
    return Sharding(
        recipe.zero_stage == WEIGHTS_TOO, table, table + others, tuple(reversed(units)), tuple(reversed(besides)),
        tuple(reversed(shares)), bucket, width.weight, weights, transposes, width.gradient,
    )  # fmt: skip
