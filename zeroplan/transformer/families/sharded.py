"""Tensor parallelism: DTensor shards a block's matrices, and the sequence between them.

The tape is one rank's. The program writes ``q`` for the rank's share of the heads; the plan later replaces it by ``q/p``. Norms
and the residual stream hold a share of the sequence, ``T/p`` tokens. An all-gather collects the whole sequence for the
projections; a reduce-scatter sums the ranks' outputs and splits the sum.
"""

from functools import partial

from zeroplan.expr import Size, at_most, symbols
from zeroplan.ledger import Among, Kind, Module
from zeroplan.transformer.blocks import Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Exchange, Linear, Mode, Site, Store, Tape, Value
from zeroplan.transformer.families.widths import SPLIT
from zeroplan.transformer.symbols import T, T_p, V, V_w, b, e, h, z, z_p

GATHER = "torch 2.13, torch/distributed/_functional_collectives.py, all_gather_single"
SCATTER = "torch 2.13, torch/distributed/_functional_collectives.py, reduce_scatter_single"
CUT = "torch 2.13, torch/distributed/tensor/placement_types.py, Shard._replicate_to_shard"

SHARES = dict(zip((*SPLIT, "k/d", V_w.text), (*symbols("a/p q/p k/p v/p c/p f/p V/p k/p/d"), V), strict=True))
_GATHERS, _SCATTERS = (Exchange(operation, Among.TENSOR, e * T * h) for operation in ("all_gather", "reduce_scatter"))
#: Row-parallel matrices, whose input features are split: a reduce-scatter sums their outputs.
_SUMMED_OVER_RANKS = {Module.O: "output of attention", Module.DOWN: "output of the MLP"}


def norm(tape: Tape, given: Value, name: str, kind: Norm, place: Place) -> Value:
    """Run a norm of the residual stream. On a share of the sequence its input is a DTensor, so autograd never adds in place."""
    if not tape.mode.sharded:
        return op.norm(tape, given, name, kind, place=place)
    share = Value(tape.hold(given.store), given.dtype, given.shape)
    tape.add(name, (share,), (), op.same_gradient(given), of=(given,), place=place)
    tape.summed_anew.add(share)
    made = op.norm(tape, share, name, kind, rows=T_p, place=place)
    tape.release(share)
    return made


def gathered(tape: Tape, value: Value, name: str, *, alike: bool = False) -> Value:
    """Return a branch's input: all-gathered along the sequence if ranks split it, else the same tensor. ``value`` stays.

    The all-gather returns a batch's sequences rank by rank; a copy reorders them. Each reader's gradient is a DTensor, one
    rank's term of a sum, and autograd never adds DTensors in place. ``alike``: all ranks compute the same with it, so each rank
    has the whole gradient and slices its share.
    """
    if not tape.mode.sharded:
        tape.hold(value.store)
        return value
    by_rank = tape.make(Kind.TEMPORARY, f"{name}, gathered rank by rank", e * T * h * at_most(1, b - 1), GATHER)
    made = op.tensor(tape, f"{name}, gathered along the sequence", value.dtype, T * h, GATHER)
    tape.send(_GATHERS)
    tape.drop(by_rank)
    if alike:
        own = op.makes(f"gradient of the {name}, a share of the sequence", CUT, value)
        tape.add(f"{name}: gathered along the sequence", (made,), (), own, of=(value,))
        return made
    beside = (f"gradient of the {name}, cut by ranks", e * T * h)
    backward = op.makes(f"gradient of the {name}, reduced and scattered", SCATTER, value, beside=beside, sends=(_SCATTERS,))
    tape.add(f"{name}: gathered along the sequence", (made,), (), backward, of=(value,))
    tape.summed_anew.add(made)
    return made


def own_share(tape: Tape, value: Value, name: str) -> Value:
    """Return this rank's share, along the sequence, of a tensor that all ranks have. It releases ``value``."""
    beside = (f"gradient of the {name}, gathered rank by rank", e * T * h * at_most(1, b - 1))
    made = op.run(
        tape, value, f"{name}, a share of the sequence", CUT, shape=T_p * h,
        gradient=f"gradient of the {name}, gathered along the sequence", beside=beside, sends_back=(_GATHERS,),
    )  # fmt: skip
    tape.release(value)
    return made


def linear_of_a_rank(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool, run: Linear) -> Value:
    """Run a rank's shard of a linear layer, with any adapter, by ``run``. One sum over the ranks covers both.

    A reduce-scatter sums the output of a branch's last layer.
    """
    made = run(tape, value, width, site, reads=reads, bias=bias)
    if site.module not in _SUMMED_OVER_RANKS:
        return made
    share = _scattered(tape, made, _SUMMED_OVER_RANKS[site.module])
    tape.release(made)
    return share


def ranks_of_adapter(site: Site) -> tuple[Size, Size]:
    """Return the outputs of an adapter's first matrix on one rank, and the inputs of its second.

    Source: AutoModel 36044ad, components/distributed/parallel_styles.py: ranks split both matrices like the weight beside them.
    """
    return (z, z_p) if site.module in _SUMMED_OVER_RANKS else (z_p, z)


def between_matrices(tape: Tape, value: Value, site: Site) -> tuple[Value, tuple[Store, ...]]:
    """Exchange the outputs of an adapter's first matrix; return the second's input, and what lives while the second runs.

    Column-parallel layers gather the outputs in a hook. In row-parallel ones they are a rank's terms of a sum, which DTensor sums
    and scatters inside the second product. Autograd saves the terms.
    """
    name, summed = f"{site.name}'s adapter, A", site.module in _SUMMED_OVER_RANKS
    source = SCATTER if summed else GATHER
    beside = tape.make(Kind.TEMPORARY, f"output of the {name}, by ranks", e * T * z, source)
    if summed:
        shares = tape.make(Kind.TEMPORARY, f"output of the {name}, summed and scattered", e * T * z_p, source)
        return value, (beside, shares)
    made = op.tensor(tape, f"output of the {name}, gathered", e, T * z, source)
    tape.drop(beside)
    extra = (f"gradient of the output of the {name}, summed", e * T * z)
    backward = op.makes(f"gradient of the output of the {name}", source, value, beside=extra)
    tape.add(f"{name}: gathered", (made,), (), backward, of=(value,))
    tape.release(value)
    return made, ()


#: How a tensor-parallel rank runs its layers.
TENSOR_PARALLEL = Mode(partial(linear_of_a_rank, run=op.trained_linear), sharded=True)


def _scattered(tape: Tape, value: Value, name: str) -> Value:
    """Reduce-scatter the ranks' outputs along the sequence."""
    cut = tape.make(Kind.TEMPORARY, f"{name}, cut by ranks", e * T * h, SCATTER)
    made = op.tensor(tape, f"{name}, reduced and scattered along the sequence", value.dtype, T_p * h, SCATTER)
    tape.send(_SCATTERS)
    tape.drop(cut)
    beside = (f"gradient of the {name}, gathered rank by rank", e * T * h * at_most(1, b - 1))
    backward = op.makes(f"gradient of the {name}, gathered along the sequence", GATHER, value, beside=beside, sends=(_GATHERS,))
    tape.add(f"{name}: scattered along the sequence", (made,), (), backward, of=(value,))
    return made
