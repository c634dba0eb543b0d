"""Blocks of the Llama kind split over tensor-parallel ranks by DTensor, and along the sequence between their matrices.

The program is that of a rank: heads and the MLP's width are its share, ``q`` standing for ``q/p`` until the plan is written down.
What the norms read and the residual stream are shares of the sequence, ``T/p`` tokens; what the projections read is whole,
gathered from all ranks, and so are what they make before it is reduced and scattered, and their gradients.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from zeroplan.errors import SpecError
from zeroplan.expr import Size, at_most, symbols
from zeroplan.ledger import Kind, Module
from zeroplan.numeric import Int
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute
from zeroplan.transformer.blocks import BlockPass, Compute, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families import traced
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.attention import LLAMA as ATTENTION
from zeroplan.transformer.families.dense import MLP
from zeroplan.transformer.families.gated import LLAMA_NORM as NORM
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.norms import AT_ATTENTION_NORM, AT_FINAL_NORM, AT_MLP_NORM, FinalNorm
from zeroplan.transformer.families.operators import Site
from zeroplan.transformer.families.parts import INCOMING, LAYER
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Alive, Store, Tape, Value
from zeroplan.transformer.families.widths import Widths, beyond_the_window, quantities
from zeroplan.transformer.symbols import T, T_p, a, b, c, d, e, f, h, k, k_d, q, v

GATHER = "torch 2.13, torch/distributed/_functional_collectives.py, all_gather_single"
SCATTER = "torch 2.13, torch/distributed/_functional_collectives.py, reduce_scatter_single"


class Structure(NamedTuple):
    """Everything the program branches on."""

    block: Block
    recompute: Recompute
    split: bool
    """There are tensor-parallel ranks."""

    @property
    def rows(self) -> Size:
        """The tokens between the matrices."""
        return T_p if self.split else T


def split_block(model: ModelSpec, compute: Compute, x: Widths) -> BlockPass:
    """One block on one of ``compute.tp`` ranks."""
    structure = _structure(model, compute, x)
    plan = _plan(structure)
    sizes = traced.Sizes(plan, local_quantities(model, x, compute.tp))
    return traced.pass_of(sizes, autocast=False, recompute=structure.recompute)


def split_norm(model: ModelSpec, x: Widths, ranks: int) -> FinalNorm:
    """The final norm over a rank's share of the sequence."""
    plan = _final_plan(wide=x.element == 4)
    return traced.Sizes(plan, local_quantities(model, x, ranks)).norm()


def local_quantities(model: ModelSpec, x: Widths, ranks: int) -> dict[str, Int]:
    """What the symbols of a rank's formulas stand for."""
    whole = quantities(x, model.intermediate_size)
    shares = {f"{name}/p": whole[name] // ranks for name in ("T", *_SPLIT)}
    shares |= {"k/p/d": x.key // ranks // x.head_dim, "V/p": model.vocab_size // ranks}
    return {**whole, **shares}


def _structure(model: ModelSpec, compute: Compute, x: Widths) -> Structure:
    beyond = beyond_the_window(model, x)
    if beyond if isinstance(beyond, bool) else beyond.any():
        ways = f"cp={compute.cp}" if compute.tp == 1 else f"tp={compute.tp}"
        raise SpecError(f"{ways} with a sliding window shorter than the sequence is not modelled; use {ways[:2]}=1")
    query, key = x.query // compute.tp, x.key // compute.tp
    block = Block(
        model.family, x.element == 4, False, x.attention, False, key != query, key == x.head_dim, model.attention_bias, x.kernels,
        activation=model.activation, ring=compute.cp,
    )  # fmt: skip
    return Structure(block, compute.recompute, compute.tp > 1)


@lru_cache(maxsize=256)
def _plan(structure: Structure) -> traced.Plan:
    index, dtypes = traced.Index(), {"wide": structure.block.wide, "autocast": False}
    tape, given, output = _run(structure, saving=True)
    forward = index.forward(tape, tape.saved, dtypes)
    whole, until_saved = tape.moments.copy(), tape.until_last_saved(done=False)
    tape.release(output, given)
    arriving = Store(Kind.ACTIVATION_GRADIENTS, "gradient of the residual stream", e * output.shape, LAYER, INCOMING)
    tape.run_backward(output, arriving)
    if structure.recompute != "none":
        tape.moments[: tape.unsaved] = _not_run_again_yet(tape, given.store, structure.recompute)
    points = index.moments(highest(tape.moments, **dtypes, scratch_apart=structure.block.ring > 1))
    selective = index.of(tape.kept())
    again: dict[Recompute, tuple[traced.Placed, ...]] = {
        "full": index.moments(traced.run_again(tape, until_saved, given.store, dtypes)),
        "selective": index.moments(traced.run_again(tape, traced.with_kept(whole, tape), given.store, dtypes)),
    }
    places = index.of((given.store,))
    made = traced.forwards(
        index,
        forward,
        given.store,
        lambda keeping: _run(structure, saving=False, given=given.store, keeping=keeping)[0],
        dtypes,
    )
    handed, stores, weights = index.handed(tape.handed), tuple(index.stores), tuple(index.weights)
    plan = traced.Plan(stores, weights, made, points, (), selective, places, LAYER, again, handed)
    return _of_a_rank(plan) if structure.split else plan


def _not_run_again_yet(tape: Tape, given: Store, recompute: Recompute) -> list[Alive]:
    """Moments of the backward before it first needs what was saved: of a checkpoint there is what it keeps, and nothing else."""
    kept = tape.kept() if recompute == "selective" else ()
    return [
        one._replace(stores=(*(store for store in one.stores if store is given or store not in tape.saved), *kept))
        for one in tape.moments[: tape.unsaved]
    ]


@lru_cache(maxsize=4)
def _final_plan(*, wide: bool) -> traced.Plan:
    tape = Tape(wide=wide, autocast=False, saving=True)
    return _of_a_rank(
        traced.norm_plan(tape, (e, T_p * h), lambda tape, given: _norm(tape, given, "final norm", place=AT_FINAL_NORM), LAYER)
    )


#: The widths that are split.
_SPLIT = ("a", "q", "k", "v", "c", "f")
_SHARES = dict(zip((*_SPLIT, "k/d"), symbols("a/p q/p k/p v/p c/p f/p k/p/d"), strict=True))


def _of_a_rank(plan: traced.Plan) -> traced.Plan:
    """Every tensor and weight, the widths that are split written as shares."""
    for store in plan.stores:
        store.size = store.size.replacing(_SHARES)
    return replace(plan, weights=tuple(weight.replacing(_SHARES) for weight in plan.weights))


def _run(
    structure: Structure, *, saving: bool, given: Store | None = None, keeping: bool = False
) -> tuple[Tape, Value, Value]:  # fmt: skip
    """Run the block forward, over an input that another run has had, or over one of its own."""
    tape = Tape(wide=structure.block.wide, autocast=False, saving=saving, keeping=keeping)
    value = traced.block_input(tape, given, (e, structure.rows * h), LAYER)
    return tape, value, _layer(tape, value, structure)


# --- the program -------------------------------------------------------------------------------------------------------


def _layer(tape: Tape, given: Value, structure: Structure) -> Value:
    addition = Site("residual addition", LAYER)
    normal = _norm(tape, given, "norm before attention", split=structure.split, place=AT_ATTENTION_NORM)
    attended, weights = _attention(tape, normal, structure)
    tape.release(normal)
    middle = op.add(tape, given, attended, "residual stream between attention and MLP", addition)
    tape.release(attended)
    normal = _norm(tape, middle, "norm before the MLP", split=structure.split, place=AT_MLP_NORM)
    branch = _mlp(tape, normal, structure)
    tape.release(normal)
    made = op.add(tape, middle, branch, "block output", addition)
    tape.release(branch, middle)
    if weights is not None:
        tape.release(weights)
    return made


def _norm(tape: Tape, given: Value, name: str, *, split: bool = True, place: Place | None = None) -> Value:
    """RMSNorm over a share of the sequence, as a DTensor: the gradients of its input add up to a tensor of their own."""
    if not split:
        return op.rms_norm(tape, given, name, NORM, place=place)
    share = Value(tape.hold(given.store), given.dtype, given.shape)
    tape.add(name, (share,), (), op.passes(given), place=place)
    tape.summed_anew.add(share)
    made = op.rms_norm(tape, share, name, NORM, rows=T_p, place=place)
    tape.release(share)
    return made


def _attention(tape: Tape, normal: Value, structure: Structure) -> Attended:
    block, whole = structure.block, gathered(tape, normal, "input of attention", split=structure.split)
    bias, norms = block.attention_bias, block.head_norms
    query = op.linear(tape, whole, q, Site("q projection", ATTENTION), bias=bias)
    query = _normal(tape, query, "norm of the queries", T * a) if norms else query
    key = op.linear(tape, whole, k, Site("k projection", ATTENTION), bias=bias)
    key = _normal(tape, key, "norm of the keys", T * k_d) if norms else key
    value = op.linear(tape, whole, v, Site("v projection", ATTENTION), bias=bias)
    turned = op.rotary(tape, query, Site("queries", ATTENTION)), op.rotary(tape, key, Site("keys", ATTENTION))
    tape.release(query, key)
    heads = Heads(*turned, value, block.grouped, block.one_key)
    context, weights = block.attend(tape, heads)
    partial = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c)
    made = scattered(tape, partial, "output of attention", split=structure.split)
    tape.release(partial, value, *turned, context, whole)
    return Attended(made, weights)


def _normal(tape: Tape, given: Value, name: str, rows: Size) -> Value:
    """Norm each head, before the next projection is made (Qwen3)."""
    made = op.rms_norm(tape, given, name, NORM, weight=d, rows=rows)
    tape.release(given)
    return made


def _mlp(tape: Tape, normal: Value, structure: Structure) -> Value:
    split, activation = structure.split, structure.block.activation
    whole = gathered(tape, normal, "input of the MLP", split=split)
    gate = op.linear(tape, whole, f, Site("gate projection", MLP))
    active = activated(tape, gate, activation, f"{activation} of the gate", MLP)
    tape.release(gate)
    up = op.linear(tape, whole, f, Site("up projection", MLP))
    inner = op.product(tape, active, up, "gated product, input of the down projection", Site("gated product", MLP))
    tape.release(active, up)
    partial = op.linear(tape, inner, h, Site("down projection", MLP, Module.DOWN), reads=f)
    made = scattered(tape, partial, "output of the MLP", split=split)
    tape.release(partial, inner, whole)
    return made


def gathered(tape: Tape, value: Value, name: str, *, split: bool) -> Value:
    """Gather along the sequence; sequences of a batch come rank by rank, and are put in order by a copy.

    The gradients of what reads it are each rank's part of a sum; they are DTensors, which autograd never adds in place.
    """
    if not split:
        tape.hold(value.store)
        return value
    by_rank = tape.make(Kind.TEMPORARY, f"{name}, gathered rank by rank", e * T * h * at_most(1, b - 1), GATHER)
    made = op.tensor(tape, f"{name}, gathered along the sequence", value.dtype, T * h, GATHER)
    tape.drop(by_rank)
    beside = (f"gradient of the {name}, cut by ranks", e * T * h)
    backward = op.makes(f"gradient of the {name}, reduced and scattered", SCATTER, value, beside=beside)
    tape.add(f"{name}: gathered along the sequence", (made,), (), backward)
    tape.summed_anew.add(made)
    return made


def scattered(tape: Tape, value: Value, name: str, *, split: bool) -> Value:
    """Add up what the ranks made, and give each its share of the sequence."""
    if not split:
        tape.hold(value.store)
        return value
    cut = tape.make(Kind.TEMPORARY, f"{name}, cut by ranks", e * T * h, SCATTER)
    made = op.tensor(tape, f"{name}, reduced and scattered along the sequence", value.dtype, T_p * h, SCATTER)
    tape.drop(cut)
    beside = (f"gradient of the {name}, gathered rank by rank", e * T * h * at_most(1, b - 1))
    backward = op.makes(f"gradient of the {name}, gathered along the sequence", GATHER, value, beside=beside)
    tape.add(f"{name}: scattered along the sequence", (made,), (), backward)
    return made
