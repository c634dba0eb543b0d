"""A frozen linear layer with several adapters, of which each token uses one: prime-rl's ``MultiLoRALinear``.

Every forward stacks the adapters' matrices. The products are grouped by the tokens of each adapter, or run one after the other,
here with all tokens in the first group, which takes the most. Run as modules of our own with the same behaviour
(tests/transformer/many_adapters.py).
"""

from zeroplan.expr import NOTHING, Size
from zeroplan.transformer.blocks import At
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Training
from zeroplan.transformer.families.frozen import dropped, frozen_linear
from zeroplan.transformer.families.operators import TEMPORARY, TENSOR
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.symbols import e, z

MANY = "prime-rl b798a90d, trainer/models/layers/lora/multi_linear.py, MultiLoRALinear.forward"


def beside_frozen(
    tape: Tape, value: Value, site: Site, training: Training, *, width: Size, reads: Size, bias: bool
) -> Value:  # fmt: skip
    """Run a frozen linear layer and its adapters on all tokens in one row."""
    name, runs = site.name, training.runs
    at = Site(f"{name} and its adapters", MANY, site.module, At.ADAPTED)
    with tape.owning():
        rows = op.view(tape, value, at)
        ends = tape.make(TENSOR, f"{name}: ends of the adapters' tokens", NOTHING + 4 * runs, MANY)
        made = frozen_linear(tape, rows, width, site, reads=reads, bias=bias, keeps_input=False)
        read = dropped(tape, rows, site) if training.dropout else rows
        multiply = _one_by_one if training.looped else _in_groups
        outer, stacks = multiply(tape, read, site, runs, (reads, width), ends)
        scaled, scale = _scaled(tape, outer, name, at)
        total = op.add(tape, made, scaled, f"output of the {name} and its adapters", at)
        total.is_matrix = True
        tape.release(scaled)
        returned = op.view(tape, total, at._replace(name=f"output of the {name}"), is_matrix=False)
        tape.release(made, outer, total, *stacks, *((read,) if training.dropout else ()), rows)
        tape.drop(scale, ends)
    return returned


def _stacks(tape: Tape, site: Site, runs: int, sizes: tuple[Size, Size]) -> tuple[Value, Value]:
    """Stack the first and the second matrices of all adapters. ``sizes``: features that the layer reads and makes."""
    first, second = (
        op.tensor(tape, f"{site.name}: all adapters' {matrix}, stacked", e, runs * z * size, MANY)
        for matrix, size in zip("AB", sizes, strict=True)
    )
    return first, second


def _in_groups(
    tape: Tape, read: Value, site: Site, runs: int, sizes: tuple[Size, Size], ends: Store
) -> tuple[Value, tuple[Value, ...]]:  # fmt: skip
    """Run both products by ``_grouped_mm``. Return the output and the stacks."""
    first, second = stacks = _stacks(tape, site, runs, sizes)
    inner = _grouped(tape, read, z, (f"{site.name}: all adapters, A", At.ADAPTER_A), first, ends, site)
    outer = _grouped(tape, inner, sizes[1], (f"{site.name}: all adapters, B", At.ADAPTER_B), second, ends, site)
    tape.release(inner)
    return outer, stacks


def _grouped(
    tape: Tape, given: Value, width: Size, named: tuple[str, At], matrices: Value, ends: Store, site: Site
) -> Value:  # fmt: skip
    """Multiply tokens with the matrices of their adapters, which get one gradient together."""
    name, at = named
    kept = (given, *((matrices,) if tape.follows(given) else ()), ends)  # the matrices are for the tokens' gradient alone
    through = op.makes(f"gradient through the {name}", MANY, given)
    return op.run(
        tape, given, f"output of the {name}", Site(name, MANY, site.module, at), dtype=e, shape=tape.rows * width, saved=kept,
        backward=op.in_turn(through, op.makes_weight_gradient(matrices.shape)), weights="trained",
    )  # fmt: skip


def _one_by_one(
    tape: Tape, read: Value, site: Site, runs: int, sizes: tuple[Size, Size], _ends: Store
) -> tuple[Value, tuple[Value, ...]]:  # fmt: skip
    """Run both products of one adapter after the other on its tokens, and join the outputs. Return these and the stacks.

    All tokens are the first adapter's. The gradient of each part of a tensor is written into zeros of the whole tensor's size.
    """
    name, (reads, width) = site.name, sizes
    stacks = _stacks(tape, site, runs, sizes)
    for stack in stacks:
        tape.add(f"{name}: stack", (stack,), (), _hand_over, of=None)
    made = list[Value]()
    for run in range(runs):
        rows, inner = tape.rows if run == 0 else NOTHING, f"{name}: adapter {run + 1}"
        part = _part(tape, read, rows * reads, f"{name}: tokens of adapter {run + 1}")
        first = _product(tape, part, stacks[0], (rows * z, z * reads), f"{inner}, A")
        tape.release(part)
        made.append(_product(tape, first, stacks[1], (rows * width, z * width), f"{inner}, B"))
        tape.release(first)
    joined = op.joined(tape, tuple(made), f"output of the {name}'s adapters, joined", tape.rows * width, MANY)
    tape.release(*made)
    return joined, stacks


def _hand_over(tape: Tape, grad_outputs: list[Store]) -> Arriving:
    """Hand over the gradient of a stack, whose views are the gradients of the matrices."""
    sizes = [one.size for one in grad_outputs]
    tape.drop(*grad_outputs)
    grad_outputs.clear()
    for size in sizes:
        tape.weight_gradient(size.replacing({e.text: 1}))
    return []


def _part(tape: Tape, whole: Value, shape: Size, name: str) -> Value:
    """Return a view of a part of a tensor."""
    made = Value(tape.hold(whole.store), whole.dtype, shape, is_matrix=True)
    tape.add(name, (made,), (), op.makes(f"gradient: {name}, among zeros", MANY, whole), of=(whole,))
    return made


def _product(tape: Tape, given: Value, stack: Value, sizes: tuple[Size, Size], name: str) -> Value:
    """Multiply by one adapter's matrix, a view of the stack. ``sizes``: of the output and of the matrix."""
    matrix = _part(tape, stack, sizes[1], f"{name}: matrix")
    kept = (given, *((matrix,) if tape.follows(given) else ()))
    backward = op.in_turn(
        op.makes(f"{name}: gradient of the matrix", MANY, matrix), op.makes(f"gradient through the {name}", MANY, given)
    )
    made = op.run(
        tape, given, f"{name}: output", MANY, dtype=e, shape=sizes[0], saved=kept, backward=backward,
        weights="trained",
    )  # fmt: skip
    tape.release(matrix)
    return made


def _scaled(tape: Tape, value: Value, name: str, site: Site) -> tuple[Value, Store]:
    """Multiply by the scale of each token's adapter, which autograd saves. The scales are found by int64 numbers of adapters."""
    numbers = tape.make(TEMPORARY, f"{name}: each token's adapter, int64", 8 * tape.rows, MANY)
    scale = tape.make(TENSOR, f"{name}: scale of each token", e * tape.rows, MANY)
    tape.drop(numbers)
    made = op.run(
        tape, value, f"output of the {name}'s adapters, scaled", site._replace(name=f"{name}'s adapters: scale"), saved=(scale,),
        gradient=f"gradient of the {name}'s adapters, not yet scaled",
    )  # fmt: skip
    return made, scale
