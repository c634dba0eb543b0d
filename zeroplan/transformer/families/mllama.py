"""Llama 3.2 Vision: the layers among a Llama's that attend to images, and the gates of the vision tower's second stack.

Queries come from the text, keys and values from the tower's output, which all these layers read. A learned number multiplies the
output of each branch. The mask, which the model makes once, says which tokens see which image.
"""

from zeroplan.expr import NOTHING, Size
from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads, with_numbers
from zeroplan.transformer.families.decoder import LAYER_NORM, LLAMA_NORM, Attention, Layer, gated_mlp, layer, ungated_mlp
from zeroplan.transformer.families.definition import Block, Program
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params_gated import attention_of, gated, head_norms, two_norms
from zeroplan.transformer.params_modules import Parameters
from zeroplan.transformer.symbols import T, T_x, a, c, d, e, h, k, k_d, q, r, s_x, v

MLLAMA = "transformers 5.23, models/mllama/modeling_mllama.py"
LAYER = f"{MLLAMA}, MllamaCrossAttentionDecoderLayer.forward"
CROSS = f"{MLLAMA}, MllamaTextCrossAttention.forward"
_ONE = NOTHING + 1


def gated_branch(tape: Tape, branch: Value, name: str, source: str) -> Value:
    """Multiply a branch by the tangent of its gate, a single number, and release the branch."""
    gate = tape.make(op.TENSOR, f"tangent of the gate of the {name}", r * _ONE, source)
    saved = (gate,) if tape.mode.weights_frozen else (branch, gate)
    made = op.weighted(tape, branch, saved, _ONE, Site(f"gate of the {name}", source))
    tape.drop(gate)
    tape.release(branch)
    return made


# --- layers that attend to images --------------------------------------------------------------------------------------------


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    return Attended(gated_branch(tape, _of_images(tape, normal, block), "attention", LAYER))


def _of_images(tape: Tape, normal: Value, block: Block) -> Value:
    query = op.linear(tape, normal, q, Site("q projection", CROSS, Module.Q))
    query = _normed(tape, query, "queries", T * a, Module.Q_NORM)
    states = Value(Store(op.TENSOR, "tokens of the images, of all layers", NOTHING + 0, CROSS), e, T_x * h)
    if block.crosses == "constant":
        tape.untracked.add(states)
    tape.rows = T_x
    key = op.linear(tape, states, k, Site("k projection", CROSS, Module.K))
    value = op.linear(tape, states, v, Site("v projection", CROSS, Module.V))
    tape.rows = T
    key = _normed(tape, key, "keys", T_x * k_d, Module.K_NORM)
    keys, values = _repeated(tape, key, "keys", block), _repeated(tape, value, "values", block)
    heads = Heads(query, keys, values, grouped=False, one_key=False, repeated=block.grouped)
    context, _ = with_numbers(tape, heads, size=block.head_size, keys=s_x)
    made = op.linear(tape, context, h, Site("output projection", CROSS, Module.O), reads=c)
    tape.release(query, key, value, keys, values, context)
    return made


def _normed(tape: Tape, bare: Value, name: str, rows: Size, module: Module) -> Value:
    made = op.norm(tape, bare, f"norm of the {name}", LLAMA_NORM, weight=d, rows=rows, place=Place(At.NORM, module))
    tape.release(bare)
    return made


def _repeated(tape: Tape, value: Value, name: str, block: Block) -> Value:
    """``repeat_kv``: a copy for each query head, as ``sdpa`` with a mask needs."""
    if not block.grouped:
        tape.hold(value.store)
        return value
    reason = f"{name} of the images, repeated for each query head"
    if block.one_key:
        made = Value(tape.hold(value.store), value.dtype, T_x * q)
        tape.add(reason, (made,), (), op.makes(f"gradient of the {name}", CROSS, value), of=(value,))
        return made
    return op.run(tape, value, reason, CROSS, shape=T_x * q, gradient=f"gradient of the {name}")


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """Run the MLP, zero its output for tokens that see no image, and multiply by its gate."""
    branch = gated_mlp(tape, normal, block, f"{MLLAMA}, MllamaTextMLP.forward")
    seeing = op.run(
        tape, branch, "output of the MLP, 0 where a token sees no image", LAYER,
        dtype=op.wider(tape, branch.dtype, r), shape=T * h, gradient="gradient of the MLP's output", widened=True,
    )  # fmt: skip
    tape.release(branch)
    return gated_branch(tape, seeing, "MLP", LAYER)


PROGRAM = layer(Layer(LLAMA_NORM, _attention, _mlp, LAYER))


def cross_parameters(model: ModelSpec) -> Parameters:
    """Return the parameters of a layer that attends to images."""
    gates = Parameter("cross_attn_attn_gate", (1,)), Parameter("cross_attn_mlp_gate", (1,))
    attention = tuple([
        one._replace(name=one.name.replace("self_attn", "cross_attn")) for one in (*attention_of(model), *head_norms(model))
    ])  # fmt: skip
    return (*gates, *attention, *gated("mlp", model, model.intermediate_size), *two_norms(model))


# --- the tower ---------------------------------------------------------------------------------------------------------------

_TOWER = f"{MLLAMA}, MllamaVisionEncoderLayer.forward"
_SELF = Attention(f"{MLLAMA}, MllamaVisionAttention.forward")


def _of_the_tower(tape: Tape, normal: Value, block: Block) -> Attended:
    made, weights = _SELF.run(tape, normal, block)
    return Attended(gated_branch(tape, made, "attention", _TOWER) if block.gated else made, weights)


def _mlp_of_the_tower(tape: Tape, normal: Value, block: Block) -> Value:
    made = ungated_mlp(tape, normal, block, f"{MLLAMA}, MllamaVisionMLP.forward")
    return gated_branch(tape, made, "MLP", _TOWER) if block.gated else made


TOWER: Program = layer(Layer(LAYER_NORM, _of_the_tower, _mlp_of_the_tower, _TOWER))
