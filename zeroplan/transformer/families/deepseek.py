"""Blocks of DeepSeek-V3: latent attention; a gated MLP in the first layers, routed and shared experts in the others."""

from zeroplan.ledger import Module
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.gated import LLAMA_NORM, Branches, gated_mlp, two_branches
from zeroplan.transformer.families.latent import latent_attention
from zeroplan.transformer.families.operators import TEMPORARY, TENSOR, Site
from zeroplan.transformer.families.pairs import picked
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.routed import Routing, divided_by_their_sum, experts_here
from zeroplan.transformer.families.tape import CAST_BY_CUDA, Arriving, Store, Tape, Value
from zeroplan.transformer.symbols import E, T, h, m, n, t

LAYER = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3DecoderLayer.forward"
MLP = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3MLP.forward"
ROUTER = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3TopkRouter.forward"
MOE = "transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3MoE.forward"


def deepseek_v3(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer."""
    return two_branches(tape, given, block, Branches(LLAMA_NORM, latent_attention, _experts if block.routed else _mlp, LAYER))


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    return gated_mlp(tape, normal, block, MLP)


def _experts(tape: Tape, normal: Value, block: Block) -> Value:
    """Routed experts, and shared ones that every token visits; the module holds the routing by name to its end."""
    routing = _router(tape, normal, block)
    flat = op.view(tape, normal, Site("experts: their input", MOE))
    with tape.inside(Module.EXPERTS):
        routed = experts_here(tape, flat, routing.weights)
    tape.release(flat)
    shared = gated_mlp(tape, normal, block, MOE, width=n * m, of="shared experts: ")
    made = op.add(tape, routed, shared, "output of routed and shared experts", Site("sum of routed and shared experts", MOE))
    tape.drop(routing.indices)
    tape.release(routed, shared, routing.weights, routing.logits)
    return made


def _router(tape: Tape, normal: Value, block: Block) -> Routing:
    """Sigmoid scores in fp32, whose multiplication autocast runs in 16 bits nevertheless."""
    flat = op.view(tape, normal, Site("router: its input", ROUTER))
    in_32_bits = not (block.wide or block.autocast)
    logits = _logits_in_32_bits(tape, flat) if in_32_bits else op.linear(tape, flat, E, Site("router", ROUTER))
    tape.release(flat)
    scores = op.pointwise(tape, logits, "router: scores of all experts", Site("router: sigmoid", ROUTER), saves_result=True)
    indices = _best(tape)
    chosen = picked(tape, scores, ("router: top-k weights", T * t), indices, ROUTER)
    tape.release(scores)
    shares = divided_by_their_sum(tape, chosen, CAST_BY_CUDA if block.autocast else 4, ROUTER)
    weights = op.tensor(tape, "router: weights, scaled", shares.dtype, shares.shape, ROUTER)
    tape.add("router: scaling", (weights,), (), op.makes("gradient of the weights before they are scaled", ROUTER, shares))
    tape.release(shares)
    return Routing(logits, weights, indices)


def _logits_in_32_bits(tape: Tape, flat: Value) -> Value:
    """The product of fp32 copies of the router's input and weight."""
    given = op.cast(tape, flat, 4, Site("input of the router", ROUTER))
    weight = Value(tape.make(TENSOR, "router's weight in fp32", 4 * E * h, ROUTER), 4, E * h)

    def cast_back(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.weight_gradient(E * h)
        return []

    tape.add("router: cast of the weight gradient", (weight,), (), cast_back)
    made = op.tensor(tape, "output of the router", 4, T * E, ROUTER)
    tape.product(made.store)
    tape.add(
        "router", (made,), (given.store, weight.store), op.makes("gradient of a factor of the router", ROUTER, given, weight)
    )
    tape.release(given, weight)
    return made


def _best(tape: Tape) -> Store:
    """The experts of each token, chosen by score and bias from the best groups. What there is for each group is left out."""
    biased = tape.make(TEMPORARY, "router: scores and bias, mask of groups, scores within them, fp32", 12 * T * E, ROUTER)
    outside = tape.make(TEMPORARY, "router: which experts are in no chosen group", T * E, ROUTER)
    indices = tape.make(TENSOR, "router: top-k indices, int64", 8 * T * t, ROUTER)
    tape.drop(biased, outside)
    return indices


PROGRAMS = {"deepseek_v3": Program(deepseek_v3, LAYER, LLAMA_NORM)}
