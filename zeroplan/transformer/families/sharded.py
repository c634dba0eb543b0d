"""What tensor parallelism does to a block: its matrices are split by DTensor over ranks, and between them the sequence.

The tape is that of a rank: heads and the MLP's width are its share, ``q`` standing for ``q/p`` until the plan is written down.
What the norms read and the residual stream are shares of the sequence, ``T/p`` tokens; what the projections read is whole,
gathered from all ranks, and so are what they make before it is reduced and scattered, and their gradients.
"""

from zeroplan.expr import Size, at_most, symbols
from zeroplan.ledger import Kind, Module
from zeroplan.transformer.blocks import Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.tape import Manner, Site, Tape, Value
from zeroplan.transformer.families.widths import SPLIT
from zeroplan.transformer.symbols import T, T_p, b, e, h

GATHER = "torch 2.13, torch/distributed/_functional_collectives.py, all_gather_single"
SCATTER = "torch 2.13, torch/distributed/_functional_collectives.py, reduce_scatter_single"

SHARES = dict(zip((*SPLIT, "k/d"), symbols("a/p q/p k/p v/p c/p f/p V/p k/p/d"), strict=True))
#: Matrices that are split by what they read: what a rank makes of its share is added up over the ranks.
_BY_COLUMNS = {Module.O: "output of attention", Module.DOWN: "output of the MLP"}


def norm(tape: Tape, given: Value, name: str, kind: NormAs, place: Place) -> Value:
    """RMSNorm of the residual stream; over a share of the sequence it is a DTensor's, whose gradients add up to a new tensor."""
    if not tape.manner.sharded:
        return op.rms_norm(tape, given, name, kind, place=place)
    share = Value(tape.hold(given.store), given.dtype, given.shape)
    tape.add(name, (share,), (), op.passes(given), of=(given,), place=place)
    tape.summed_anew.add(share)
    made = op.rms_norm(tape, share, name, kind, rows=T_p, place=place)
    tape.release(share)
    return made


def gathered(tape: Tape, value: Value, name: str) -> Value:
    """What a branch reads: gathered along the sequence, where that is split. The name for ``value`` stays.

    Sequences of a batch come rank by rank, and are put in order by a copy. The gradients of what reads it are each rank's part
    of a sum; they are DTensors, which autograd never adds in place.
    """
    if not tape.manner.sharded:
        tape.hold(value.store)
        return value
    by_rank = tape.make(Kind.TEMPORARY, f"{name}, gathered rank by rank", e * T * h * at_most(1, b - 1), GATHER)
    made = op.tensor(tape, f"{name}, gathered along the sequence", value.dtype, T * h, GATHER)
    tape.drop(by_rank)
    beside = (f"gradient of the {name}, cut by ranks", e * T * h)
    backward = op.makes(f"gradient of the {name}, reduced and scattered", SCATTER, value, beside=beside)
    tape.add(f"{name}: gathered along the sequence", (made,), (), backward, of=(value,))
    tape.summed_anew.add(made)
    return made


def _linear(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool) -> Value:
    """A rank's part of a linear layer; what the last one of a branch makes is added up over the ranks and scattered."""
    made = op.trained_linear(tape, value, width, site, reads=reads, bias=bias)
    if site.module not in _BY_COLUMNS:
        return made
    share = _scattered(tape, made, _BY_COLUMNS[site.module])
    tape.release(made)
    return share


#: How a rank's layers run.
SHARED_OUT = Manner(_linear, sharded=True)


def _scattered(tape: Tape, value: Value, name: str) -> Value:
    """Add up what the ranks made, and give each its share of the sequence."""
    cut = tape.make(Kind.TEMPORARY, f"{name}, cut by ranks", e * T * h, SCATTER)
    made = op.tensor(tape, f"{name}, reduced and scattered along the sequence", value.dtype, T_p * h, SCATTER)
    tape.drop(cut)
    beside = (f"gradient of the {name}, gathered rank by rank", e * T * h * at_most(1, b - 1))
    backward = op.makes(f"gradient of the {name}, gathered along the sequence", GATHER, value, beside=beside)
    tape.add(f"{name}: scattered along the sequence", (made,), (), backward, of=(value,))
    return made
