"""Which module goes backward at which point of a block with low-rank adapters, and what is gathered then?

Most modules of such a block make no gradient, so that the number of gradients made does not tell where its backward is; the
operator's name does.
"""

from functools import lru_cache
from typing import NamedTuple, get_args

from zeroplan.engines.deepspeed.notes import Gathered, Note
from zeroplan.spec.model import Activation
from zeroplan.transformer.blocks import RECOMPUTED, BackwardPoint

_LAYERS = {
    "q projection": "self_attn.q_proj", "k projection": "self_attn.k_proj", "v projection": "self_attn.v_proj",
    "output projection": "self_attn.o_proj", "gate projection": "mlp.gate_proj", "up projection": "mlp.up_proj",
    "down projection": "mlp.down_proj",
}  # fmt: skip
_PARTS = {", A": ".lora_A.default", ", B": ".lora_B.default", ": scale": ""}
_OTHERS = {
    "norm before attention": "input_layernorm", "norm before the MLP": "post_attention_layernorm",
    "norm of the queries": "self_attn.q_norm", "norm of the keys": "self_attn.k_norm",
    **dict.fromkeys((*get_args(Activation), "gelu"), "mlp.act_fn"),
}  # fmt: skip
#: Operators that are no module's, and the linear layer that has gone backward before them.
_BETWEEN = {
    "gated product": "mlp.down_proj", "attention": "self_attn.o_proj", "rotary positions of the queries": "self_attn.o_proj",
    "rotary positions of the keys": "self_attn.o_proj",
}  # fmt: skip


class Place(NamedTuple):
    """A block, what is gathered in it at a point, and most while what the point needs was being gathered. [elements]"""

    block: int
    held: int
    gathering: int


@lru_cache(maxsize=4096)
def highest_places(trace: Gathered, first: int, n_blocks: int, point: str, current: int) -> tuple[Place, ...]:
    """Return the last block, and earlier ones where more is gathered, at a point that makes ``current`` elements of gradients."""
    chosen: list[Place] = []
    for block in range(first + n_blocks - 1, first - 1, -1):
        held, gathering = _held(dict(trace.modules[block]), point, current)
        if not chosen or held > chosen[-1].held or gathering > chosen[-1].gathering:
            chosen.append(Place(block, held, gathering))
    return tuple(chosen)


def _held(notes: dict[str, Note], point: str, current: int) -> tuple[int, int]:
    """While a module's parameters are gathered, no gradient of it is there: neither its own, nor that of its input."""
    if point.startswith(RECOMPUTED):
        return _until(notes, point), 0
    if before := _BETWEEN.get(point.partition(":")[0]):  # attention that is written out has several points
        return _linear(notes, before).after, 0
    layer, _, part = point.partition("'s adapter")
    if part:
        note = notes[_LAYERS[layer] + _PARTS[part]]
    else:
        note = _linear(notes, _LAYERS[point]) if point in _LAYERS else notes[_OTHERS[point.partition(":")[0]]]
    return max(note.during, note.gathering - current if current else 0), note.gathering if point in _LAYERS else 0


def _until(notes: dict[str, Note], point: str) -> int:
    """What is gathered when a recomputation has made what the point names; if no layer's output, all that it gathers."""
    layer = next((_LAYERS[name] for name in _LAYERS if f"output of the {name}" in point), "")
    of_layer = [
        notes[name].gathering for name in (f"{RECOMPUTED}: {layer}", f"{RECOMPUTED}: {layer}.base_layer") if name in notes
    ]
    return max(of_layer, default=notes[RECOMPUTED].gathering)


def _linear(notes: dict[str, Note], name: str) -> Note:
    return notes.get(f"{name}.base_layer") or notes[name]


def before_its_gradient(point: BackwardPoint) -> BackwardPoint:
    """Return the point of a frozen linear layer before it has made the gradient of its input."""
    made = f"gradient through the {point.name}"
    return point._replace(lines=tuple(line for line in point.lines if line.reason != made))
