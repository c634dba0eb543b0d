"""torchtitan's own Llama 3 (0.2.2 and 0.3.0): a block, and the operators from the blocks to the loss.

Differences from transformers' modules: the norm is one operator, rotary positions are fp32 complex numbers, and the training
loop frees the logits before the backward. Its checkpoints recompute the whole block (``early_stop=False``). In 0.3 one product
makes queries, keys and values, each layer looks up the rotations of its tokens' positions, and FlexAttention runs.
"""

from functools import partial

from zeroplan.ledger import Kind, Line, Module
from zeroplan.transformer.blocks import At
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads, flex
from zeroplan.transformer.families.decoder import Layer, gated_mlp, layer
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.ending import cross_entropy
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tags import AT_FINAL_NORM
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.families.widths import Widths
from zeroplan.transformer.symbols import T, V, c, d, e, h, k, q, s, v

MODEL = "torchtitan 0.2.2, models/llama3/model/model.py"
LAYER = f"{MODEL}, TransformerBlock.forward"
ATTENTION = f"{MODEL}, Attention.forward"
ROTARY = f"{MODEL}, apply_rotary_emb"
NORM = "torch 2.13, aten/src/ATen/native/cuda/layer_norm_kernel.cu, _fused_rms_norm"
_NORM = Norm("fused", NORM)
SINCE_0_3 = "torchtitan 0.3.0, models/common"
QKV = f"{SINCE_0_3}/attention.py, FusedQKVLinear.forward"
LOOKED_UP = f"{SINCE_0_3}/rope.py, _reshape_for_broadcast"


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    widths = ((q, "q projection"), (k, "k projection"), (v, "v projection"))
    query, key, value = (op.linear(tape, normal, width, Site(name, ATTENTION)) for width, name in widths)
    with_positions = _rotated(tape, query, key)
    tape.release(query, key)
    context, _ = block.attend(tape, Heads(*with_positions, value, block.grouped, block.one_key))
    tape.release(*with_positions, value)
    made = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c)
    tape.release(context)
    return Attended(made)


def _attention_since_0_3(tape: Tape, normal: Value, block: Block) -> Attended:
    joint = op.linear(tape, normal, q + k + v, Site("joint q, k and v projection", QKV))
    query, key, value = op.copies(tape, joint, (("queries", T * q), ("keys", T * k), ("values", T * v)), QKV)
    tape.release(joint)
    positions = tape.make(op.TENSOR, "rotations of the tokens' positions, complex numbers", 4 * T * d, LOOKED_UP)
    with_positions = _rotated(tape, query, key, positions)
    tape.drop(positions)
    tape.release(query, key)
    context, _ = flex(tape, Heads(*with_positions, value, block.grouped, block.one_key))
    tape.release(*with_positions, value)
    made = op.linear(tape, context, h, Site("output projection", f"{SINCE_0_3}/attention.py, GQAttention.forward"), reads=c)
    tape.release(context)
    return Attended(made)


def _rotated(tape: Tape, query: Value, key: Value, rotations: Store | None = None) -> tuple[Value, Value]:
    """Multiply queries and keys, as pairs of fp32 numbers, by complex rotations. Autograd saves a block's own ``rotations``.

    The compiler leaves complex products as they are. Its code frees a tensor after its last use, where Python's variables live on.
    """
    frees, names = tape.mode.rotary is not None, ("queries", "keys")
    conjugate = 4 * s * d if rotations is None else 4 * T * d
    wide = [op.cast(tape, one, 4, Site(name, ROTARY)) for one, name in zip((query, key), names, strict=True)]
    with_positions, narrow = list[Value](), list[Value]()
    for one, name in zip(wide, names, strict=True):
        with_positions.append(
            op.run(
                tape, one, f"{name}, rotated, fp32", ROTARY, dtype=4,
                gradient=f"gradient of the {name}, fp32", beside=("conjugate rotations", conjugate),
                saved=() if rotations is None else (rotations,),
            )
        )  # fmt: skip
        tape.release(*((one,) if frees else ()))
    for one in with_positions:
        narrow.append(op.cast(tape, one, query.dtype, Site("queries or keys, rotated", ROTARY)))
        tape.release(*((one,) if frees else ()))
    tape.release(*(() if frees else (*wide, *with_positions)))
    return narrow[0], narrow[1]


PROGRAM = layer(Layer(_NORM, _attention, partial(gated_mlp, source=f"{MODEL}, FeedForward.forward"), LAYER))
_MLP = partial(gated_mlp, source=f"{SINCE_0_3}/feed_forward.py, FeedForward.forward")
PROGRAM_SINCE_0_3 = layer(Layer(_NORM, _attention_since_0_3, _MLP, "torchtitan 0.3.0, models/llama3/model.py"))


def rotations(x: Widths, layers: int = 1) -> Line:
    """Return the complex rotations of all positions of a sequence: a buffer of the model, or since 0.3 of each layer."""
    n_bytes, formula = 4 * x.seq_len * x.head_dim * layers, "4·s·d" if layers == 1 else f"{4 * layers}·s·d"
    return Line(Kind.PARAMETERS, n_bytes, "rotary positions, complex numbers", formula, ROTARY)


def ending(tape: Tape) -> Value:
    """Run final norm, head and loss; return the loss. The training loop frees the logits once it has the loss."""
    given = Value(tape.make(op.TENSOR, "final norm: its input", e * T * h, NORM), e, T * h)
    normal = op.norm(tape, given, "final norm", _NORM, place=AT_FINAL_NORM)
    tape.release(given)
    logits = op.linear(tape, normal, V, Site("head", LAYER, Module.HEAD, At.HEAD))
    tape.release(normal)
    logits.store.kind = Kind.LOGITS
    loss, names = cross_entropy(tape, logits, ())
    tape.drop(*names)
    tape.release(logits)
    return loss
