"""Which hidden states do Megatron-Core's pipeline schedules keep alive after the backward that used them?

The schedules are Python functions whose variables, and a module attribute, still refer to tensors that nothing needs. Each is one
hidden state of a micro-batch. On the first rank, chunk 0 has no input and hence none of these.
"""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.ledger import Kind, Line, Role, Tag
from zeroplan.numeric import Int, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.megatron import element_of, own_part, own_part_formula

_HELD = Tag(Role.UNTIL_NEXT_STEP)
INPUT = "Megatron-LM 2026-08, megatron/core/transformer/transformer_block.py, TransformerBlock.set_input_tensor"
PLAIN = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving"
INTERLEAVED = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving"


class Stage(NamedTuple):
    """A pipeline rank as its schedule sees it."""

    at: int
    ranks: int
    chunks: int
    """Chunks of layers on the rank."""
    micro_batches: Int
    group: int
    """Micro-batches that pass a chunk before the next chunk's turn."""

    @property
    def is_last(self) -> bool:
        """Whether the rank has the head."""
        return self.at == self.ranks - 1

    @property
    def inputs(self) -> int:
        """Chunks that receive hidden states."""
        return self.chunks - (self.at == 0)

    @property
    def rounds(self) -> Int:
        """Pairs of a forward and a backward, which follow the warm-up."""
        warm = self.ranks - self.at - 1 if self.chunks == 1 else 2 * (self.ranks - self.at - 1) + (self.chunks - 1) * self.group
        return self.micro_batches * self.chunks - warm


class Left(NamedTuple):
    """How many hidden states are left from before, during a forward, a backward and the optimizer's step."""

    forward: Int
    backward: Int
    step: Int


class LeftLines(NamedTuple):
    """The same in bytes, as lines of each phase."""

    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    step: tuple[Line, ...]


def left_of(stage: Stage, *, overlapped: bool) -> Left:
    """Count the hidden states that a schedule refers to and no longer needs.

    1F1B: the last input and its gradient until the next forward is over, and the gradient that came for an output until the next
    one comes; the backward that uses it counts it itself.

    >>> left_of(Stage(1, 2, 1, 4, 2), overlapped=False), left_of(Stage(0, 2, 1, 4, 2), overlapped=False)
    (Left(forward=2, backward=1, step=2), Left(forward=1, backward=0, step=0))
    """
    if stage.ranks == 1:
        return Left(0, 0, 0)
    came = int(not stage.is_last)
    if stage.chunks > 1:
        return _left_between_chunks(stage, came, overlapped=overlapped)
    several = stage.rounds > 1
    return Left(where(several, 2 * stage.inputs + came, 0), where(several, stage.inputs, 0), 2 * stage.inputs)


def _left_between_chunks(stage: Stage, came: int, *, overlapped: bool) -> Left:
    """Of the interleaved schedule.

    Every chunk keeps its last input and that one's gradient. A backward's result lives until the next one's. Where sends and
    receives are overlapped, the input of the first round is never let go, and the next input comes before the backward.
    """
    several = stage.rounds > 1
    if not overlapped:
        return Left(where(several, 1 + came, 0), where(several, 1, 0), 2 * stage.inputs)
    first = where(stage.rounds > 2 * (stage.ranks - stage.at - 1) + 1, 2, 0)
    ahead = int(not stage.is_last or stage.group > stage.ranks)  # a gradient of an output, received early
    return Left(where(several, first + 1 + ahead, 0), where(several, first + 2, 0), 2 * stage.inputs)


def left_lines(left: Left, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> LeftLines:
    """What is left during a forward, a backward and the optimizer's step, as lines. [bytes]"""
    each = own_part(element_of(recipe) * batch.micro_batch_size * batch.seq_len * model.hidden_size, recipe, mesh)
    formula = own_part_formula("e·T·h", recipe)
    source = INTERLEAVED if recipe.pipeline_schedule == "interleaved-1f1b" else PLAIN
    reason = "hidden states and gradients that the schedule still refers to"
    held = "last input of every chunk and its gradient, which the chunk still refers to"
    return LeftLines(
        tuple(_line(left.forward, each, reason, f"L_f·{formula}", source)),
        tuple(_line(left.backward, each, reason, f"L_b·{formula}", source)),
        tuple(one._replace(tag=_HELD) for one in _line(left.step, each, held, f"L_s·{formula}", INPUT)),
    )


def _line(count: Int, each: Int, reason: str, formula: str, source: str) -> Iterator[Line]:
    if not isinstance(count, int) or count:
        yield Line(Kind.ACTIVATIONS, count * each, reason, formula, source)
