"""Granite MoE (Granite 3's 1B-A400M and 3B-A800M): Granite's attention and multipliers, and a softmax over the chosen experts."""

from functools import partial

from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import Attention, Layer, layer
from zeroplan.transformer.families.definition import Around, Block, Definition
from zeroplan.transformer.families.experts import Routing, picked, routed_experts
from zeroplan.transformer.families.keys import WITH_EXPERTS
from zeroplan.transformer.families.llama import MULTIPLIERS
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, before_and_after
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, fused_experts, with_experts
from zeroplan.transformer.params_modules import Parameters, linear
from zeroplan.transformer.symbols import E, T, t

GRANITE = "transformers 5.23, models/granitemoe/modeling_granitemoe.py"
ROUTER = f"{GRANITE}, GraniteMoeTopKRouter.forward"


def moe(tape: Tape, normal: Value, block: Block) -> Value:
    """Run router and experts. The router's logits live until the module returns."""
    flat = op.view(tape, normal, Site("experts: their input", f"{GRANITE}, GraniteMoeMoE.forward"))
    routing = _router(tape, flat)
    made = routed_experts(tape, flat, routing.weights, block)
    tape.drop(routing.indices)
    tape.release(flat, routing.weights, routing.logits)
    return made


def _router(tape: Tape, flat: Value) -> Routing:
    """Choose experts by the logits in fp32. Their weights are the softmax of the chosen logits."""
    with tape.owning(leaf=True):
        bare = op.linear(tape, flat, E, Site("router", ROUTER))
    logits = op.cast(tape, bare, 4, Site("router: logits", ROUTER))
    tape.release(bare)
    indices = tape.make(op.TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    chosen = picked(tape, logits, ("router: top-k logits", T * t), indices, ROUTER)
    shares = op.pointwise(tape, chosen, "router: weights in fp32", ROUTER, saves_result=True)
    weights = op.cast(tape, shares, flat.dtype, Site("router: weights", ROUTER))
    tape.release(chosen, shares)
    return Routing(logits, weights, indices)


def of_moe(model: ModelSpec, experts: MoeSpec) -> Parameters:
    """Return the parameters of router and experts."""
    name = "block_sparse_moe"
    return (*linear(f"{name}.router", model.hidden_size, experts.num_experts), *fused_experts(model, experts, name))


def _tensors(model: ModelSpec) -> Layout:
    return with_experts(model, attention_of(model, bias=model.attention_bias), partial(of_moe, model), norms_first=True)


_LAYER = Layer(
    Norm("cast, then weighted", f"{GRANITE}, GraniteMoeRMSNorm.forward"),
    Attention(f"{GRANITE}, GraniteMoeAttention.forward").run,
    moe,
    f"{GRANITE}, GraniteMoeDecoderLayer.forward",
    multiplied=True,
)
CONFIG = WITH_EXPERTS.plus(defaults={"max_position_embeddings": 2048}, fixed={"mlp_bias": False}, harmless=MULTIPLIERS)
MODULES = tuple(f"block_sparse_moe{name}" for name in ("", ".router", ".experts", ".experts.act_fn"))
FAMILIES = {
    "granitemoe": Definition(
        layer(_LAYER), _tensors, CONFIG, expert_modules=before_and_after(ATTENTION_MODULES, MODULES),
        around=Around(scales_embeddings=True),
    )
}  # fmt: skip
