"""torchtitan's Llama 3 as programs (0.2.2): a block, and the way from the blocks to the loss.

What differs from transformers' modules: the norm is one operator, rotary positions are complex numbers in fp32, and the loss lets
go of the logits before its backward. Checkpoints run to the end of a block (``early_stop=False``).
"""

from zeroplan.ledger import Kind, Line, Module
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import Heads
from zeroplan.transformer.families.ending import cross_entropy
from zeroplan.transformer.families.gated import gated_mlp
from zeroplan.transformer.families.norms import AT_ATTENTION_NORM, AT_FINAL_NORM, AT_MLP_NORM
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.families.widths import Widths
from zeroplan.transformer.symbols import T, V, c, d, e, h, k, q, s, v

LAYER = "torchtitan 0.2.2, models/llama3/model/model.py, TransformerBlock.forward"
ATTENTION = "torchtitan 0.2.2, models/llama3/model/model.py, Attention.forward"
ROTARY = "torchtitan 0.2.2, models/llama3/model/model.py, apply_rotary_emb"
MLP = "torchtitan 0.2.2, models/llama3/model/model.py, FeedForward.forward"
NORM = "torch 2.13, aten/src/ATen/native/cuda/layer_norm_kernel.cu, _fused_rms_norm"


def block(tape: Tape, given: Value, structure: Block) -> Value:
    """One ``TransformerBlock``."""
    addition = Site("residual addition", LAYER)
    normal = fused_norm(tape, given, "norm before attention", AT_ATTENTION_NORM)
    attended = _attention(tape, normal, structure)
    tape.release(normal)
    middle = op.add(tape, given, attended, "residual stream between attention and MLP", addition)
    tape.release(attended)
    normal = fused_norm(tape, middle, "norm before the MLP", AT_MLP_NORM)
    branch = gated_mlp(tape, normal, structure, MLP)
    tape.release(normal)
    made = op.add(tape, middle, branch, "block output", addition)
    tape.release(branch, middle)
    return made


def fused_norm(tape: Tape, value: Value, name: str, place: Place) -> Value:
    """``torch.nn.RMSNorm``, one operator: it saves its input, and an fp32 number per token."""
    made = op.tensor(tape, f"output of the {name}", value.dtype, value.shape, NORM)
    kept = tape.make(op.TENSOR, f"{name}: reciprocal root mean square", 4 * T, NORM)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.weight_gradient(h)
        return [(value, op.gradient(tape, value, f"gradient through the {name}", NORM))]

    tape.add(name, (made,), (value.store, kept), backward, of=None, place=place)
    tape.drop(kept)
    return made


def _attention(tape: Tape, normal: Value, structure: Block) -> Value:
    widths = ((q, "q projection"), (k, "k projection"), (v, "v projection"))
    query, key, value = (op.linear(tape, normal, width, Site(name, ATTENTION)) for width, name in widths)
    turned = _rotary(tape, query, key)
    tape.release(query, key)
    context, _ = structure.attend(tape, Heads(*turned, value, structure.grouped, structure.one_key))
    tape.release(*turned, value)
    made = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c)
    tape.release(context)
    return made


def _rotary(tape: Tape, query: Value, key: Value) -> tuple[Value, Value]:
    """Queries and keys as pairs of fp32 numbers, times complex numbers of which autograd keeps no copy."""
    wide = [op.cast(tape, one, 4, Site(name, ROTARY)) for one, name in ((query, "queries"), (key, "keys"))]
    turned = [_turned(tape, one, name) for one, name in zip(wide, ("queries", "keys"), strict=True)]
    narrow = [op.cast(tape, one, query.dtype, Site("queries or keys, turned", ROTARY)) for one in turned]
    tape.release(*wide, *turned)
    return narrow[0], narrow[1]


def _turned(tape: Tape, value: Value, name: str) -> Value:
    made = op.tensor(tape, f"{name}, turned, fp32", 4, value.shape, ROTARY)
    backward = op.makes(f"gradient of the {name}, fp32", ROTARY, value, beside=("conjugate rotations", 4 * s * d))
    tape.add(f"rotary positions of the {name}", (made,), (), backward, of=(value,))
    return made


def rotations(x: Widths) -> Line:
    """The complex numbers of all positions of a sequence, a buffer of the model."""
    return Line(Kind.PARAMETERS, 4 * x.seq_len * x.head_dim, "rotary positions, complex numbers", "4·s·d", ROTARY)


def ending(tape: Tape) -> tuple[Store, Value]:
    """What follows the blocks: its input, and the loss, which the loop works out of the logits and then lets go of."""
    given = Value(tape.make(op.TENSOR, "final norm: its input", e * T * h, NORM), e, T * h)
    normal = fused_norm(tape, given, "final norm", AT_FINAL_NORM)
    tape.release(given)
    logits = op.linear(tape, normal, V, Site("head", LAYER, Module.HEAD, At.HEAD))
    tape.release(normal)
    logits.store.kind = Kind.LOGITS
    loss, names = cross_entropy(tape, logits, ())
    tape.drop(*names)
    tape.release(logits)
    return given.store, loss


PROGRAM = Program(block, LAYER)
