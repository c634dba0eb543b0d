"""Apertus: Llama's block with norms of queries and keys, and an MLP without a gate whose activation function is trained (xIELU).

xIELU is ``alpha_p·x² + beta·x`` where x is positive, and ``alpha_n·(expm1(min(x, eps)) - x) + beta·x`` elsewhere; both alphas are
trained. torch computes both for every x.
"""

from zeroplan.expr import NOTHING
from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import LLAMA_NORM, Attention, Layer, layer
from zeroplan.transformer.families.definition import Block, Definition
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import WITH_LATE_NORMS
from zeroplan.transformer.families.tape import CAST_BY_CUDA, Arriving, Site, Store, Tape, Value, Width
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params_gated import alike, dense_block, head_norms
from zeroplan.transformer.params_modules import linear
from zeroplan.transformer.symbols import T, f, h

APERTUS = "transformers 5.23, models/apertus/modeling_apertus.py"
MLP = f"{APERTUS}, ApertusMLP.forward"
XIELU = "transformers 5.23, activations.py, XIELUActivation._xielu_python"
_ONE = NOTHING + 1


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    inner = op.linear(tape, normal, f, Site("up projection", MLP, Module.UP), bias=block.mlp_bias)
    active = _xielu(tape, inner)
    tape.release(inner)
    made = op.linear(tape, active, h, Site("down projection", MLP, Module.DOWN), reads=f, bias=block.mlp_bias)
    tape.release(active)
    return made


def _xielu(tape: Tape, x: Value) -> Value:
    """Return xIELU of ``x``, which stays. Its module has both alphas."""
    with tape.owning():
        return _both_parts(tape, x)


def _both_parts(tape: Tape, x: Value) -> Value:
    """Compute xIELU for positive and for negative numbers. Under autocast the alphas are fp32, and widen what they multiply."""
    wide: Width = 4 if tape.autocast else x.dtype
    alphas = tape.make(op.TENSOR, "xielu: both alphas", 2 * wide * _ONE, XIELU)
    positive = tape.make(op.TENSOR, "xielu: where x is positive", T * f, XIELU)
    linear_part = _times_alpha(tape, x, wide, "alpha_p·x", alphas)
    square = op.product(tape, linear_part, x, "xielu: alpha_p·x²", _site("xielu: alpha_p·x²"))
    tape.release(linear_part)
    above = _plus_beta(tape, square, x, "where x is positive")
    rest = _exponential_part(tape, x)
    times = _times_alpha(tape, rest, wide, "alpha_n times the exponential part", alphas)
    tape.release(rest)
    below = _plus_beta(tape, times, x, "where x is negative")
    made = op.run(
        tape, (above, below), "xielu, input of the down projection", _site("xielu: choice of the part"), dtype=wide,
        saved=(positive,), gradient="gradient of one part of xielu",
    )  # fmt: skip
    tape.release(above, below)
    tape.drop(positive, alphas)
    return made


def _plus_beta(tape: Tape, value: Value, x: Value, name: str) -> Value:
    """Return ``value + beta·x``, and release ``value``."""
    part = op.multiplied(tape, x, "xielu: beta·x", _site("xielu: beta·x"))
    made = op.add(tape, value, part, f"xielu {name}", _site(f"xielu: sum {name}"))
    tape.release(value, part)
    return made


def _exponential_part(tape: Tape, x: Value) -> Value:
    """Return ``expm1(min(x, eps)) - x``. Autocast computes the exponential in fp32."""
    least = op.run(
        tape, x, "xielu: min(x, eps)", _site("xielu: min(x, eps)"), saved=(x,), gradient="gradient through the minimum",
        beside=("half of the gradient, and where x is eps or more", x.dtype * x.shape + 2 * x.shape),
    )  # fmt: skip
    base = op.cast(tape, least, CAST_BY_CUDA if tape.autocast else x.dtype, _site("xielu: exponent"))
    power = op.run(
        tape, base, "xielu: expm1", _site("xielu: expm1"), saves_result=True, gradient="gradient of the exponent",
        beside=("xielu: exponential", base.dtype * x.shape),
    )  # fmt: skip
    tape.release(least, base)
    made = op.tensor(tape, "xielu: expm1 - x", op.wider(tape, power.dtype, x.dtype), x.shape, XIELU)
    difference = op.in_turn(op.same_gradient(power), op.makes_widened("xielu: negative gradient", XIELU, x, made))
    tape.add("xielu: expm1 - x", (made,), (), difference, of=(power, x), place=_site("").place)
    tape.release(power)
    return made


def _times_alpha(tape: Tape, value: Value, dtype: Width, name: str, alphas: Store) -> Value:
    """Multiply by an alpha. Its gradient is a sum over all elements, for which autograd saves ``value``."""
    made = op.tensor(tape, f"xielu: {name}", dtype, value.shape, XIELU)
    frozen = tape.mode.weights_frozen

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        passed = tape.make(op.GRADIENT, f"gradient through {name}", made.dtype * made.shape, XIELU)
        if not frozen:
            unsummed = ("gradient of an alpha, not yet summed", made.dtype * made.shape, XIELU)
            tape.weight_gradient(_ONE, unsummed=unsummed, read=(value.store,))
        return [(value, op.as_narrow(tape, value, passed, made, XIELU))]

    saved = (alphas,) if frozen else (value, alphas)
    tape.add(f"xielu: {name}", (made,), saved, backward, of=tape.with_weight(value), place=_site("").place)
    return made


def _site(name: str) -> Site:
    return Site(name, XIELU, Module.ACTIVATION, At.MODULE)


_LAYER = layer(
    Layer(
        LLAMA_NORM, Attention(f"{APERTUS}, ApertusAttention.forward", norm=LLAMA_NORM).run, _mlp,
        f"{APERTUS}, ApertusDecoderLayer.forward",
    )
)  # fmt: skip


def _tensors(model: ModelSpec) -> Layout:
    hidden, width = model.hidden_size, model.intermediate_size
    mlp = (*linear("mlp.up_proj", hidden, width), *linear("mlp.down_proj", width, hidden))
    alphas = (Parameter("mlp.act_fn.alpha_p", (1,)), Parameter("mlp.act_fn.alpha_n", (1,)))
    names = ("attention_layernorm", "feedforward_layernorm")
    return alike(model, dense_block(model, of_heads=head_norms(model), mlp=(*mlp, *alphas), names=names))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 65536},
    fixed={"mlp_bias": False},
    only={"hidden_act": ("xielu",), "qk_norm": (True,), "post_norm": (False,)},
)
_MODULES = ("attention_layernorm", "self_attn", *WITH_LATE_NORMS, "feedforward_layernorm", "mlp")
FAMILIES = {
    "apertus": Definition(_LAYER, _tensors, _CONFIG, (*_MODULES, "mlp.up_proj", "mlp.act_fn", "mlp.down_proj")),
}
