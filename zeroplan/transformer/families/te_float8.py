"""Layers that Transformer Engine runs in float8 in NeMo AutoModel's models: the most that they allocate. Read, not run.

A layer quantises its input and its weight in two orders: by rows for its own product, by columns for those of its backward. It
keeps the input by columns. The copies of a linear layer's weight count until the backward, though new releases make them again
under FSDP2. Those of the experts' weights outlive the step: AutoModel tells every layer which micro-batch is the first, so that the
experts keep them for the next ones (``_fp8_workspaces``), even if FSDP2 shards the weights.
A byte for the scale of 32 elements is the most that a recipe has. Experts pad their pairs to whole groups of 32.
"""

from zeroplan.expr import Size, ceil
from zeroplan.ledger import Kind, Line, Role, Tag
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.tape import Mode, P_own, Site, Store, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.symbols import E, T, e, h, r, x

LINEAR = "Transformer Engine d0067d0, pytorch/module/linear.py, _linear_forward_impl"
GROUPED = "Transformer Engine d0067d0, pytorch/module/grouped_linear.py, _GroupedLinear.forward"


CACHED = "Transformer Engine d0067d0, pytorch/module/grouped_linear.py, _GroupedLinear.forward, cache_weight"
_MATRICES = 3  # dimensions of a tensor of one matrix for each expert


def cached(tree: Layout) -> Line:
    """Return the copies of all experts' weights of a rank in both orders, which its layers keep. [bytes]"""
    matrices = [(run.layers, one) for run in tree.runs for one in run.parameters if ".experts." in one.name]
    elements = sum(layers * one.numel for layers, one in matrices if len(one.shape) == _MATRICES)
    n_bytes = 2 * (elements + elements // 32)
    return Line(Kind.PARAMETERS, n_bytes, "experts' weights in float8, in both orders", f"2·{n_bytes // 2}", CACHED)


def mode_of(mode: Mode) -> Mode:
    """Return the mode in which linear layers run in float8, if they are Transformer Engine's."""
    return mode._replace(linear=_linear) if "te-linear" in mode.fused else mode


def _quantised(elements: Size) -> Size:
    return elements + ceil(elements, 32)


def _linear(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False) -> Value:
    """``te.Linear``. AutoModel's routers are none."""
    if width == E:
        return op.trained_linear(tape, value, width, site, reads=reads, bias=bias)
    given = op.cast(tape, value, e, Site(f"input of the {site.name}", site.source))
    kept = _copies(tape, site.name, T * reads, LINEAR)
    kept += (tape.make(op.TENSOR, f"weights of {site.name} in float8, in both orders", 2 * _quantised(reads * width), LINEAR),)
    made = op.tensor(tape, f"output of the {site.name}", e, T * width, site.source, Tag(Role.OUTPUT, site.module))
    tape.matrix_product(made.store)
    backward = op.in_turn(
        op.needs(LINEAR, (f"gradient of the {site.name}'s output in float8, in both orders", 2 * _quantised(T * width))),
        op.makes(f"gradient through the {site.name}", LINEAR, given),
        op.makes_weight_gradient(reads * width + width if bias else reads * width),
    )
    tape.add(site.name, (made,), kept, backward, of=None, place=site.place)
    tape.drop(*kept)
    tape.release(given)
    return made


def _copies(tape: Tape, name: str, inputs: Size, source: str) -> tuple[Store, ...]:
    """Quantise a layer's input. Return what its backward reads of it."""
    by_rows = tape.make(op.TEMPORARY, f"input of {name} in float8, by rows", _quantised(inputs), source)
    by_columns = tape.make(op.TENSOR, f"input of {name} in float8, by columns", _quantised(inputs), source)
    tape.drop(by_rows)
    return (by_columns,)


def grouped(tape: Tape, value: Value, site: tuple[str, Size, Size]) -> Value:
    """``te.GroupedLinear`` of this rank's experts, with the copies that padding makes of its input and output."""
    name = site[0]
    reads, width, pairs = map(
        tape.in_this_run, (site[1], site[2], P_own)
    )  # arguments of a function, which the tape does not search
    rows = pairs + 32 * x
    padded = tape.make(op.TEMPORARY, f"{name}: padded input or output", e * rows * (reads + width), GROUPED)
    kept = _copies(tape, name, rows * reads, GROUPED)
    made = op.tensor(tape, f"{name}: output", r, P_own * width, GROUPED)
    tape.drop(padded)
    backward = op.in_turn(
        op.needs(
            GROUPED, (f"padded gradients of {name}", e * rows * (reads + width)),
            (f"gradient of {name} in float8, in both orders", 2 * _quantised(rows * width)),
        ),
        op.makes_weight_gradient(x * reads * width, waits=True),
        op.makes(f"gradient of the input of {name}", GROUPED, value),
    )  # fmt: skip
    tape.add(name, (made,), kept, backward, of=None)
    tape.drop(*kept)
    return made
