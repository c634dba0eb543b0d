"""The operators of blocks: what each allocates, what autograd saves for it, and what its backward allocates.

Sizes are those of the eager operators of torch 2.13. Tensors have the names of transformers' variables. :func:`run` runs one
operator: one call says what it allocates, what it keeps, and what its backward makes.
"""

from contextlib import nullcontext
from typing import Literal, NamedTuple, TypeAlias

from zeroplan.expr import NOTHING, Size, ceil
from zeroplan.ledger import PLAIN, Kind, Role, Tag
from zeroplan.transformer.blocks import Place
from zeroplan.transformer.families.tags import CUDA_ALONE, NORMALISED, STATISTICS
from zeroplan.transformer.families.tape import (
    CAST_BY_CUDA,
    Arriving,
    Backward,
    Beside,
    Exchange,
    Saved,
    Site,
    Store,
    Tape,
    Value,
    Width,
)
from zeroplan.transformer.symbols import T, b, d, e, h, r, s

LIGER_NORM = "liger_kernel 0.8.5, ops/rms_norm.py, LigerRMSNormFunction"
LIGER_GATE = "liger_kernel 0.8.5, ops/swiglu.py, LigerSiLUMulFunction"
PROCESSORS = 132
"""Multiprocessors of an H100. An A100 has 108 and a B200 148, which is a quarter of a MB of a norm's weight gradient."""
FUSED_NORM = "fms-acceleration 876e2ed, fms_acceleration_foak/kernels/unsloth/rms_layernorm.py, Fast_RMS_Layernorm"

TENSOR, GRADIENT, TEMPORARY = Kind.ACTIVATIONS, Kind.ACTIVATION_GRADIENTS, Kind.TEMPORARY

Named: TypeAlias = tuple[str, Size]
"""A tensor: its reason, and its bytes."""


def tensor(
    tape: Tape, reason: str, dtype: Width, shape: Size, source: str, tag: Tag = PLAIN, *, kind: Kind = TENSOR
) -> Value:  # fmt: skip
    """Allocate and return a tensor that gets a gradient."""
    return Value(tape.make(kind, reason, dtype * shape, source, tag), dtype, shape)


def gradient(
    tape: Tape, value: Value, reason: str, source: str, tag: Tag = PLAIN, *, kind: Kind = GRADIENT, dtype: Width | None = None
) -> Store:  # fmt: skip
    """Allocate and return the gradient of a tensor, by default in its dtype."""
    return tape.make(kind, reason, (value.dtype if dtype is None else dtype) * value.shape, source, tag)


def gradient_of_product(tape: Tape, value: Value, reason: str, source: str) -> Store:
    """Return the gradient of a linear layer's input: of three dimensions it is a view of what the product returns."""
    made = gradient(tape, value, reason, source)
    made.is_view = not value.is_matrix
    return made


def through(value: Value, passed: Store) -> tuple[Value, Store]:
    """Return ``passed`` itself as the gradient of ``value``."""
    passed.holds += 1
    return value, passed


def same_gradient(*values: Value) -> Backward:
    """Return a backward that allocates nothing: its gradient is also the gradient of each of ``values``."""
    return lambda tape, grad_outputs: [through(value, grad_outputs[0]) for value in values if tape.follows(value)]


def overwrites(*values: Value) -> Backward:
    """Return a backward that writes the gradients of ``values`` over the values themselves."""
    return lambda tape, _grad_outputs: [through(value, value.store) for value in values if tape.follows(value)]


def makes(
    reason: str, source: str, *values: Value, beside: Named | None = None, sends: tuple[Exchange, ...] = (),
    kind: Kind = GRADIENT, dtype: Width | None = None,
) -> Backward:  # fmt: skip
    """Return a backward that allocates a gradient of each of ``values``, after a temporary ``beside`` (reason, size)."""

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        if beside is not None:
            tape.temporary(*beside, source)
        followed = [value for value in values if tape.follows(value)]
        made = [(value, gradient(tape, value, reason, source, kind=kind, dtype=dtype)) for value in followed]
        tape.send(*sends)
        return made

    return backward


def makes_of_product(value: Value, site: Site) -> Backward:
    """Return a backward that makes the gradient of a linear layer's input."""

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        reason = f"gradient through the {site.name}"
        return [(value, gradient_of_product(tape, value, reason, site.source))] if tape.follows(value) else []

    return backward


def makes_widened(reason: str, source: str, value: Value, made: Value) -> Backward:
    """Return a backward that makes the gradient of ``value`` in the dtype of the result ``made``, and casts it if it is wider."""

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        passed = tape.make(GRADIENT, reason, made.dtype * made.shape, source)
        return [(value, as_narrow(tape, value, passed, made, source))]

    return backward


def makes_weight_gradient(*elements: Size, waits: bool = False) -> Backward:
    """Return a backward that makes only the gradients of weights (:meth:`Tape.weight_gradient`)."""

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        for one in elements:
            tape.weight_gradient(one, waits=waits)
        return []

    return backward


def trains(
    *elements: Size, waits: bool = False, beside: tuple[str, Size, str] | None = None,
    unsummed: tuple[str, Size, str] | None = None,
) -> Backward:  # fmt: skip
    """Return the same for a module's own weights, which may be frozen: then it makes nothing, nor a temporary ``beside``.

    ``unsummed``: the tensor whose sum is the gradient.
    """

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        if tape.mode.weights_frozen:
            return []
        if beside is not None:
            tape.temporary(*beside)
        for one in elements:
            tape.weight_gradient(one, waits=waits, unsummed=unsummed)
        return []

    return backward


def needs(source: str, *temporaries: Named, kind: Kind = TEMPORARY) -> Backward:
    """Return a backward that allocates temporaries, which live until the operator ends."""

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        for reason, size in temporaries:
            tape.temporary(reason, size, source, kind=kind)
        return []

    return backward


def in_turn(*steps: Backward) -> Backward:
    """Return a backward that runs these one after the other."""
    return lambda tape, grad_outputs: [one for step in steps for one in step(tape, grad_outputs)]


def run(
    tape: Tape, inputs: Value | tuple[Value, ...], reason: str, site: Site | str, *, dtype: Width | None = None,
    shape: Size | None = None, passing: tuple[Named, ...] = (), saved: Saved = (), keeps: tuple[Named, ...] = (),
    saves_result: bool = False, gradient: str = "", beside: Named | None = None, backward: Backward | None = None,
    weights: Literal["none", "own", "trained"] = "none", saves_weight: bool = False, reads: tuple[Beside, ...] = (),
    widened: bool = False, tag: Tag = PLAIN, strided: tuple[Value, ...] = (), sends: tuple[Exchange, ...] = (),
    sends_back: tuple[Exchange, ...] = (),
) -> Value:  # fmt: skip
    """Run an operator with one output, by default of the first input's dtype and elements. The inputs stay.

    ``site``: a source alone, if the operator has its output's name. ``passing``: temporaries beside the output. It saves
    ``saved``, and ``keeps``, tensors of its own, which nothing else holds. ``gradient`` is the reason of the gradients that its
    ``backward`` allocates, if that is not given; without either, the output's gradient passes as it is. ``widened``: that gradient
    is made in the output's dtype, and cast for a narrower input. ``weights``: it has weights, its module's own, which may be
    frozen, or such as are trained in any case.
    """
    inputs, site = (inputs,) if isinstance(inputs, Value) else inputs, site_of(site, reason)
    brief = [tape.make(TEMPORARY, *one, site.source) for one in passing]
    dtype = inputs[0].dtype if dtype is None else dtype
    made = tensor(tape, reason, dtype, inputs[0].shape if shape is None else shape, site.source, tag)
    kept = [tape.make(TENSOR, *one, site.source) for one in keeps]
    tape.send(*sends)
    tape.drop(*brief)
    if backward is None:
        through = makes(gradient, site.source, *inputs, beside=beside, sends=sends_back) if gradient else same_gradient(*inputs)
        backward = makes_widened(gradient, site.source, inputs[0], made) if widened else through
    of = {"none": inputs, "own": tape.with_weight(*inputs), "trained": None}[weights]
    tape.add(
        site.name, (made,), (*saved, *((made,) if saves_result else ()), *kept), backward, of=of, place=site.place,
        strided=strided, saves_weight=saves_weight, beside=reads,
    )  # fmt: skip
    tape.drop(*kept)
    return made


def site_of(site: Site | str, name: str) -> Site:
    """Return the site of an operator, which has the name of its output if only its source is given."""
    return Site(name, site) if isinstance(site, str) else site


def stores_of(saved: Saved) -> tuple[Store, ...]:
    """Return the memory of an operator's saved tensors."""
    return tuple([one.store if isinstance(one, Value) else one for one in saved])


def wider(tape: Tape, first: Width, second: Width) -> Width:
    """Return the dtype of an operator's result for inputs of two dtypes; the first if both are equally wide."""
    return second if tape.is_wide(second) and not tape.is_wide(first) else first


# --- casts, views and sums ---------------------------------------------------------------------------------------------------


def cast(tape: Tape, value: Value, dtype: Width, site: Site, tag: Tag = PLAIN) -> Value:
    """``Tensor.to``: the same tensor where it has that dtype already, else a copy. ``value`` stays."""
    if tape.is_wide(value.dtype) == tape.is_wide(dtype):
        tape.hold(value.store)
        return value
    name, suffix = site.name, {4: " in fp32", e: ", cast"}.get(dtype, "")
    at = site._replace(name=f"{name}: cast")
    return run(tape, value, f"{name}{suffix}", at, dtype=dtype, gradient=f"gradient through the {name}", tag=tag)


def view(tape: Tape, value: Value, site: Site, *, is_matrix: bool = True) -> Value:
    """``Tensor.view``, by default as a matrix: the same memory. Its gradients are summed before they reach ``value``, as a view."""
    made = Value(tape.hold(value.store), value.dtype, value.shape, is_matrix=is_matrix)

    def backward(_tape: Tape, grad_outputs: list[Store]) -> Arriving:
        grad_outputs[0].is_view = True
        return [through(value, grad_outputs[0])]

    tape.add(f"{site.name}: view", (made,), (), backward, of=(value,), place=site.place)
    return made


def heads_of(tape: Tape, value: Value, name: str, source: str) -> Value:
    """Return a view of a projection's output as heads, which replaces ``value``.

    A copy from host memory is in head order, and so is its gradient, which the view's backward copies.
    """
    if not tape.offloading:
        return value
    made = Value(value.store, value.dtype, value.shape)
    backward = makes(f"gradient of the {name} in the order of tokens", source, value)
    tape.add(f"heads of the {name}", (made,), (), backward, of=(value,))
    return made


def slices(tape: Tape, whole: Value, shapes: tuple[Size, ...], site: Site) -> tuple[Value, ...]:
    """``x[..., a:b]`` for each shape: views. The backward of each writes its gradient into zeros of the whole tensor's size."""
    views = tuple(Value(tape.hold(whole.store), whole.dtype, shape, strided=True) for shape in shapes)
    for view in views:
        tape.add(site.name, (view,), (), makes(f"gradient of the {site.name}", site.source, whole), of=(whole,))
    return views


def copies(tape: Tape, whole: Value, parts: tuple[tuple[str, Size], ...], source: str) -> tuple[Value, ...]:
    """Copy parts of a tensor, each to its own memory. One backward joins their gradients."""
    made = tuple(tensor(tape, name, whole.dtype, shape, source) for name, shape in parts)
    tape.add("parts copied", made, (), makes("gradients of the parts, joined", source, whole), of=(whole,))
    return made


def chunk(tape: Tape, whole: Value, shapes: tuple[Size, ...], site: Site) -> tuple[Value, ...]:
    """``x.chunk(n, dim=-1)``: views. One backward joins their gradients."""
    views = tuple(Value(tape.hold(whole.store), whole.dtype, shape, strided=True) for shape in shapes)
    tape.add(site.name, views, (), makes(f"gradients of the {site.name}, joined", site.source, whole), of=(whole,))
    return views


def joined(tape: Tape, parts: tuple[Value, ...], reason: str, shape: Size, site: Site | str) -> Value:
    """``cat`` in the widest dtype. Gradients of the parts are views; a narrower part's gradient is a cast copy."""
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = wider(tape, dtype, part.dtype)
    return _of_terms(tape, parts, reason, dtype, shape, site)


def add(tape: Tape, first: Value, second: Value, reason: str, site: Site | str) -> Value:
    """``first + second`` in the wider dtype. The gradient goes to both, cast for one that is narrower."""
    return _of_terms(tape, (first, second), reason, wider(tape, first.dtype, second.dtype), first.shape, site)


def add_in_place(tape: Tape, first: Value, second: Value, _reason: str, site: Site) -> Value:
    """``first += second``, in the dtype of ``first``. The gradient goes to both, cast if ``second`` is narrower."""
    made = Value(tape.hold(first.store), first.dtype, first.shape)

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        return [through(first, grad_outputs[0]), narrowed(tape, second, grad_outputs[0], made, site)]

    tape.add(site.name, (made,), (), backward, of=(first, second), place=site.place)
    return made


def _of_terms(tape: Tape, terms: tuple[Value, ...], reason: str, dtype: Width, shape: Size, place: Site | str) -> Value:
    site = site_of(place, reason)
    made = tensor(tape, reason, dtype, shape, site.source)

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        return [narrowed(tape, one, grad_outputs[0], made, site) for one in terms if tape.follows(one)]

    tape.add(site.name, (made,), (), backward, of=terms, place=site.place)
    return made


def as_narrow(tape: Tape, value: Value, passed: Store, made: Value, source: str) -> Store:
    """Return the gradient of an input: ``passed``, or a cast copy if the operator made it in its result's wider dtype."""
    if tape.is_wide(value.dtype) == tape.is_wide(made.dtype):
        return passed
    tape.scratch.append(passed)
    return gradient(tape, value, f"{passed.reason}, cast", source, CUDA_ALONE if made.dtype == CAST_BY_CUDA else PLAIN)


def narrowed(tape: Tape, value: Value, grad_outputs: Store, made: Value, site: Site) -> tuple[Value, Store]:
    """Return a sum's gradient as that of one term: the same tensor, or a cast copy for a narrower term."""
    if tape.is_wide(value.dtype) == tape.is_wide(made.dtype):
        return through(value, grad_outputs)
    return value, gradient(tape, value, "gradient of the residual stream, cast for the branch", site.source)


# --- matrix products ---------------------------------------------------------------------------------------------------------


def linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, addmm: bool = False
) -> Value:  # fmt: skip
    """``nn.Linear`` from ``reads`` to ``width`` features. Autograd saves its input."""
    with tape.owning():
        if tape.mode.linear is not None:
            return tape.mode.linear(tape, value, width, site, reads=reads, bias=bias)
        return trained_linear(tape, value, width, site, reads=reads, bias=bias, addmm=addmm)


def trained_linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, addmm: bool = False,
    copies: Size | None = None,
) -> Value:  # fmt: skip
    """``nn.Linear`` whose weight is trained; or ``bmm`` with ``copies`` weights, each for its own tokens.

    Autocast casts the arguments from the last to the first, so the backward casts the input's gradient first. ``addmm``: the
    layer calls ``addmm`` with the bias first (transformers' ``Conv1D``), so the backward casts the bias's gradient first.
    """
    matrix = reads * width if copies is None else copies * reads * width
    weights = [width, matrix] if bias else [matrix]
    kept = matrix if tape.follows(value) else None  # only the gradient of the input needs the weight's copy
    before = weights[addmm:] if tape.autocast else []
    casts = [_weight(tape, one, site, tracked=one is kept, of="weight" if one is matrix else "bias") for one in before]
    given = cast(tape, value, e, Site(f"input of the {site.name}", site.source))
    if addmm and tape.autocast:
        casts.append(_weight(tape, width, site, tracked=False, of="bias"))
    rows = tape.rows if copies is None else T * copies
    made = tensor(tape, f"output of the {site.name}", e, rows * width, site.source, Tag(Role.OUTPUT, site.module))
    if not bias and copies is None:
        tape.matrix_product(made.store)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        """``mm`` makes the weight's gradient first, ``addmm`` the input's. ``addmm`` sums the bias's gradient last."""
        of_weight = [] if bias else _weight_gradient(tape, matrix, casts, site)
        arriving = makes_of_product(given, site)(tape, [])
        if bias:
            of_weight = _weight_gradient(tape, matrix, casts, site)
            tape.used(given.store)
            of_weight += _weight_gradient(tape, width, casts, site)
        return [*arriving, *of_weight]

    read = (Beside(f"weight of the {site.name}", e * matrix, strided=not addmm),) if kept is not None else ()
    cast_of = kept if casts else None
    tape.add(site.name, (made,), (given,), backward, of=None, cast=cast_of, place=site.place, beside=read)
    tape.release(given)
    return made


def _weight_gradient(tape: Tape, elements: Size, casts: list[Value], site: Site) -> Arriving:
    """Make the gradient of a linear layer's parameter, or of its copy among ``casts``."""
    copy = next((one for one in casts if one.shape is elements), None)
    if copy is None:
        tape.weight_gradient(elements)
        return []
    reason = f"gradient of the {site.name}'s weights, not yet cast"
    return [(copy, tape.make(TEMPORARY, reason, e * elements, site.source))]


def batched_linear(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, copies: Size) -> Value:
    """``bmm`` with ``copies`` weights, each for its own tokens. If they are frozen, autograd saves them alone."""
    if not tape.mode.weights_frozen:
        return trained_linear(tape, value, width, site, reads=reads, copies=copies)
    weight = Beside(f"weight of the {site.name}", e * copies * reads * width, strided=True)
    return run(
        tape, value, f"output of the {site.name}", site, dtype=e, shape=T * copies * width,
        gradient=f"gradient through the {site.name}", saves_weight=True, reads=(weight,),
    )  # fmt: skip


def wide_linear(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size) -> Value:
    """``nn.Linear`` in fp32, outside autocast, whose weight is trained."""
    made = tensor(tape, f"output of the {site.name}", 4, tape.rows * width, site.source, Tag(Role.OUTPUT, site.module))
    tape.matrix_product(made.store)
    backward = in_turn(makes_weight_gradient(reads * width), makes_of_product(value, site))
    tape.add(site.name, (made,), (value,), backward, of=None, place=site.place)
    return made


def _weight(tape: Tape, elements: Size, site: Site, *, tracked: bool, of: str) -> Value:
    """Make autocast's copy of a weight or bias. Its gradient is made in 16 bits and then cast.

    The engine counts the bytes of a weight's copy, which lives to the backward. A bias's copy lives to the end of the forward.
    """
    if tracked and not tape.offloading:
        tape.hold_cast(elements)
    else:
        tape.cached.append(elements)
    made = Value(Store(TEMPORARY, "", NOTHING, ""), e, elements)
    tape.add(f"{site.name}: cast of the {of} gradient", (made,), (), makes_weight_gradient(elements), of=None)
    return made


def convolution(
    tape: Tape, value: Value, width: Size, taps: Size, site: Site, *, bias: bool = False, is_called: bool = True
) -> Value:  # fmt: skip
    """Depthwise ``F.conv1d`` of ``width`` channels over ``taps`` tokens, padded at both ends and cut to the sequence.

    ``is_called``: its module runs; else the module around it reads the weight.

    The module casts its input to the weight's dtype; autocast then makes a copy of its own.
    """
    wide = cast(tape, value, r, Site(f"input of the {site.name}, in its weight's dtype", site.source))
    with tape.owning() if is_called else nullcontext():
        given, made = _conv1d(tape, wide, width, taps, site, bias=bias)
    (cut,) = slices(tape, made, (T * width,), Site(f"sequence in the {site.name}'s output", site.source))
    tape.release(given, made)
    return cut


def _conv1d(tape: Tape, wide: Value, width: Size, taps: Size, site: Site, *, bias: bool) -> tuple[Value, Value]:
    """Run ``nn.Conv1d``, and release ``wide``. Return the input that autograd saves, and the output."""
    elements = width * taps
    frozen = tape.mode.weights_frozen
    casts = tape.autocast and not frozen
    biases = [_weight(tape, width, site, tracked=False, of="bias")] if casts and bias else []
    weight = _weight(tape, elements, site, tracked=True, of="weight") if casts else None
    given = cast(tape, wide, e, Site(f"input of the {site.name}", site.source))
    made = tensor(tape, f"output of the {site.name}", e, (T + b * (taps - 1)) * width, site.source)
    tape.release(wide)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        arriving = [(given, gradient(tape, given, f"gradient through the {site.name}", site.source))]
        if frozen:
            return arriving
        if weight is None:
            tape.weight_gradient(elements)
            for _ in range(bias):
                tape.weight_gradient(width)
            return arriving
        reason = f"gradient of the {site.name}'s weight, not yet cast"
        return [*arriving, *((one, tape.make(TEMPORARY, reason, e * one.shape, site.source)) for one in (weight, *biases))]

    cast_of = None if weight is None else elements
    tape.add(site.name, (made,), (given.store,), backward, of=tape.with_weight(given), cast=cast_of, place=site.place)
    return given, made


Factor = tuple[Value, Saved]
"""A factor of a product, and the tensors that the product saves of it for the gradient of the other factor."""


def factors(tape: Tape, first: Factor, second: Factor) -> Saved:
    """Return the tensors that a product saves: each factor only if autograd tracks the other."""
    return (*(first[1] if tape.follows(second[0]) else ()), *(second[1] if tape.follows(first[0]) else ()))


def matmul(
    tape: Tape, first: Value, second: Value, made_as: tuple[str, Size], site: Site, copies: tuple[Store, ...] = ()
) -> Value:  # fmt: skip
    """``first @ second`` in their dtype, or in autocast's; ``made_as``: the result's name and elements. It saves both factors.

    ``copies``: contiguous copies that the kernel reads instead of its factors, and saves too.
    """
    reason, shape = made_as
    dtype = e if tape.autocast else first.dtype
    right = cast(tape, second, dtype, Site(f"second factor of the {site.name}", site.source))
    left = cast(tape, first, dtype, Site(f"first factor of the {site.name}", site.source))
    saved = (*factors(tape, (left, (left,)), (right, (right,))), *copies)
    of = f"gradient of a factor of the {site.name}"
    made = run(tape, (right, left), reason, site, dtype=dtype, shape=shape, saved=saved, gradient=of)
    tape.release(left, right)
    return made


# --- elementwise operators ---------------------------------------------------------------------------------------------------


def pointwise(tape: Tape, value: Value, reason: str, site: Site | str, *, saves_result: bool = False) -> Value:
    """An activation function in one operator. Autograd saves its input (SiLU, GELU) or its result (ReLU). ``value`` stays."""
    saved, of = () if saves_result else (value,), f"gradient of the input of {site_of(site, reason).name}"
    return run(tape, value, reason, site, saved=saved, saves_result=saves_result, gradient=of)


def exponential(tape: Tape, value: Value, reason: str, source: str) -> Value:
    """``exp``. Autograd saves its result. ``value`` stays."""
    return pointwise(tape, value, reason, source, saves_result=True)


def softmax_in_32_bits(tape: Tape, value: Value, reason: str, cast_at: Site, site: Site) -> Value:
    """``softmax(dtype=torch.float32)``. Autograd saves its result. ``value`` stays.

    It works on a cast copy of 16 bits, except for fp16 on CUDA: there one kernel reads fp16, and its backward writes fp16.
    Source: torch 2.13, aten/src/ATen/native/SoftMax.cpp, softmax.
    """
    if tape.fused_softmax and not tape.is_wide(value.dtype):
        return run(tape, value, reason, site, dtype=4, saves_result=True, gradient=f"gradient of the input of {site.name}")
    wide = cast(tape, value, 4, cast_at)
    made = pointwise(tape, wide, reason, site, saves_result=True)
    tape.release(wide)
    return made


def product(tape: Tape, first: Value, second: Value, reason: str, place: Site | str) -> Value:
    """``first * second`` in the wider dtype. Autograd saves each factor if it tracks the other.

    The backward makes a narrower factor's gradient in the wider dtype, and casts it afterwards.
    """
    site = site_of(place, reason)
    made = tensor(tape, reason, wider(tape, first.dtype, second.dtype), first.shape, site.source)
    saved = factors(tape, (first, (first,)), (second, (second,)))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        followed = [one for one in (first, second) if tape.follows(one)]
        name = f"gradient of a factor of the {site.name}"
        bare = [tape.make(GRADIENT, name, wider(tape, one.dtype, made.dtype) * one.shape, site.source) for one in followed]
        if any(tape.is_wide(one.dtype) != tape.is_wide(made.dtype) for one in followed):
            tape.used(*stores_of(saved))
        return [(one, as_narrow(tape, one, wide, made, site.source)) for one, wide in zip(followed, bare, strict=True)]

    tape.add(site.name, (made,), saved, backward, of=(first, second), place=site.place)
    return made


def times_per_row(tape: Tape, value: Value, factor: Value, reason: str, dtype: Width, source: str) -> Value:
    """``value * factor`` with one factor per row, whose gradient the backward sums over each row. It saves both.

    The gradient of a narrower ``value`` is made in ``dtype``, and cast afterwards.
    """
    made = tensor(tape, reason, dtype, value.shape, source)
    saved = factors(tape, (value, (value,)), (factor, (factor,)))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.temporary(f"gradient of a factor of {reason}, not yet summed", dtype * value.shape, source)
        of = f"gradient of a factor of {reason}"
        if tape.is_wide(value.dtype) == tape.is_wide(dtype):
            return [(one, gradient(tape, one, of, source)) for one in (value, factor) if tape.follows(one)]
        wide = tape.make(GRADIENT, of, dtype * value.shape, source)
        tape.used(*stores_of(saved))
        narrow = gradient(tape, value, f"{of}, cast", source)
        tape.drop(wide)
        return [(value, narrow), (factor, gradient(tape, factor, of, source))]

    tape.add(reason, (made,), saved, backward, of=(value, factor))
    return made


def plus_constant(tape: Tape, value: Value, reason: str, site: Site | str) -> Value:
    """Add a constant. Autograd saves nothing, and the gradient passes unchanged. ``value`` stays."""
    return run(tape, value, reason, site)


def plus_bias(
    tape: Tape, value: Value, elements: Size, reason: str, site: Site | str, *, dtype: Width | None = None,
    shape: Size | None = None,
) -> Value:  # fmt: skip
    """Add a parameter of so many ``elements``. Autograd saves nothing. ``value`` stays."""
    backward = in_turn(trains(elements), same_gradient(value))
    return run(tape, value, reason, site, dtype=dtype, shape=shape, backward=backward, weights="own")


def multiplied(tape: Tape, value: Value, reason: str, site: Site | str) -> Value:
    """Multiply by a constant. It saves nothing. ``value`` stays."""
    return run(tape, value, reason, site, gradient=f"gradient through the {site_of(site, reason).name}")


def without_padding(tape: Tape, value: Value, source: str, *, padded: bool) -> Value:
    """Multiply by the mask of a batch with padding, which the model holds; else return ``value``, held once more."""
    if not padded:
        tape.hold(value.store)
        return value
    return multiplied(tape, value, "tokens without padding", Site("mask of padding", source))


def scaled(tape: Tape, value: Value, reason: str, site: Site | str) -> Value:
    """Multiply by a constant and release ``value``: the forward stores the product under the same variable."""
    made = multiplied(tape, value, reason, site)
    tape.release(value)
    return made


def scaled_by_position(tape: Tape, queries: Value, source: str) -> Value:
    """Multiply each token's queries by a number that grows with its position, and release them."""
    scale = tape.make(TENSOR, "scale of each token's queries", queries.dtype * s, source)
    made = run(tape, queries, "queries, scaled", source, saved=(scale,), gradient="gradient of the queries")
    tape.drop(scale)
    tape.release(queries)
    return made


def rotary(
    tape: Tape, value: Value, site: Site, *, part: Size | None = None, tables: Width = r, saved: Saved = (),
    per_token: Size = d,
) -> Value:  # fmt: skip
    """``x·cos + rotate_half(x)·sin`` with ``tables`` of that dtype. It saves nothing of the block. ``value`` stays.

    Unsloth's kernel writes over ``value``, and in the backward over the gradient.

    ``part``: the elements that positions rotate, where these are not all; ``saved``: the block's own copies of the tables.
    ``per_token``: elements of a table for each token. Its backward reads one table at a time, when less is alive than at its end.
    """
    if tape.mode.rotary is not None and part is None:
        return tape.mode.rotary(tape, value, site)
    if "rope" in tape.mode.fused and part is None:
        return view(tape, value, site)
    dtype = wider(tape, value.dtype, tables)
    rotary_part = value.shape if part is None else part
    direct = tape.make(TEMPORARY, f"{site.name} times cos", dtype * rotary_part, site.source)
    negative = tape.begin_brief(f"{site.name}, second half negated", ceil(value.dtype * rotary_part, 2), site.source)
    with_positions = tape.make(TEMPORARY, f"{site.name}, halves exchanged", value.dtype * rotary_part, site.source)
    tape.end_brief(negative)
    times_sin = tape.make(TEMPORARY, f"{site.name} times sin", dtype * rotary_part, site.source)
    tape.drop(with_positions)
    made = tensor(tape, site.name, dtype, value.shape, site.source)
    tape.drop(direct, times_sin)
    read = tuple(Beside(f"rotary {one}", tables * s * per_token, brief=True) for one in ("cos", "sin"))
    own = () if tape.offloading else saved
    if tape.mode.sends_by:  # AutoModel, models/gpt_oss/rope_utils.py, apply_rotary_emb: narrow tables for each call
        own = (*own, tape.make(TENSOR, f"rotary cos and sin of the {site.name}", e * T * per_token, site.source))
    backward = _turned_back(value, site, rotary_part, dtype)
    tape.add(f"rotary positions of the {site.name}", (made,), own, backward, of=(value,), beside=read)
    tape.drop(*(one for one in own if tape.mode.sends_by and isinstance(one, Store)))
    return made


def _turned_back(value: Value, site: Site, part: Size, dtype: Width) -> Backward:
    """Return the backward of rotary positions, which turn a ``part`` of ``value`` in ``dtype``."""
    reason = f"gradient of the {site.name}"

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        times_sin = tape.make(TEMPORARY, f"{reason}, times sin", dtype * part, site.source)
        negative = tape.begin_brief(f"{reason}, first half negated", ceil(value.dtype * part, 2), site.source)
        given = gradient(tape, value, reason, site.source)
        tape.end_brief(negative)
        other = tape.make(TEMPORARY, "gradient of the other half", value.dtype * part, site.source)
        tape.drop(times_sin, other)
        tape.end_brief(tape.begin_brief(f"{reason}, times cos", dtype * part, site.source))
        return [(value, given)]

    return backward


# --- norms -------------------------------------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """How a family writes its norms.

    ``layer``: ``nn.LayerNorm``. ``fused``: ``torch.nn.RMSNorm``. The others are RMSNorm in single operators, in fp32: Llama's
    casts its result back and then multiplies by the weight, gpt-oss multiplies and then casts, Gemma multiplies by 1 + weight.
    ``copied weight, then cast``: Nemotron-H's multiplies by its weight in fp32. ``power``: Gemma 4's does so too, or has no
    weight, and takes the root as a power. ``layer, written out``: Cohere's LayerNorm, in single operators too. ``cast, then
    weighted, unnamed``: Llama 4's, which holds no step by a variable; ``no weight``: it ends with the cast.
    """

    kind: Literal[
        "layer", "fused", "cast, then weighted", "weighted, then cast", "copied weight, then cast", "one plus weight",
        "power", "power, no weight", "layer, written out", "cast, then weighted, unnamed", "no weight",
    ]  # fmt: skip
    source: str


_WITHOUT_WEIGHT = ("power, no weight", "no weight")
#: Norms that multiply by their weight, in whichever order they cast.
_PLAIN_RMS_NORMS = ("cast, then weighted", "weighted, then cast", "copied weight, then cast")


def norm(
    tape: Tape, value: Value, name: str, kind: Norm, *, weight: Size = h, rows: Size = T, place: Place | None = None,
    means: list[Store] | None = None,
) -> Value:  # fmt: skip
    """Run a norm of ``rows`` rows whose weight has ``weight`` elements.

    ``means`` gets the means of an RMSNorm in single operators, if the variable that holds them does not end with the norm.
    """
    at, module = place or Place()
    site = Site(name, kind.source, module, at)
    with tape.owning() if kind.kind not in _WITHOUT_WEIGHT else nullcontext():
        if tape.mode.norm is not None:
            return tape.mode.norm(tape, value, weight, rows, site)
        if "rms-norm" in tape.mode.fused and kind.kind == "cast, then weighted":
            return _norm_by_unsloth(tape, value, rows, site)
        if "liger-rms-norm" in tape.mode.fused and kind.kind == "cast, then weighted":
            return _norm_by_liger(tape, value, weight, rows, site)
        if kind.kind in ("layer", "fused") or ("norm-in-one" in tape.mode.fused and kind.kind in _PLAIN_RMS_NORMS):
            return _norm_in_one_operator(tape, value, weight, rows, site, is_layer=kind.kind == "layer")
        if kind.kind == "layer, written out":
            return _layer_norm_written_out(tape, value, weight, rows, site)
        return _rms_norm(tape, value, kind, weight, rows, site, means)


def _layer_norm_written_out(tape: Tape, value: Value, weight: Size, rows: Size, site: Site) -> Value:
    """Run a LayerNorm in single operators. It subtracts the mean for the variance and again for the result; both are saved."""
    wide = cast(tape, value, 4, site._replace(name=f"{site.name}: its input"))
    mean = run(
        tape, wide, f"{site.name}: mean", site._replace(name=f"{site.name}: mean"), shape=rows,
        gradient="gradient of the norm's input through its mean",
    )  # fmt: skip
    once = _less_mean(tape, wide, mean, site)
    root, named = _reciprocal_root(tape, once, rows, site, names_mean=True)
    tape.release(once)
    again = _less_mean(tape, wide, mean, site)
    normal = _times_root(tape, again, root, site)
    tape.release(wide, again, root)
    made = _weighted_in_32_bits(tape, normal, value.dtype, weight, site, copied=not tape.is_wide(r))
    tape.release(mean)
    tape.drop(*named)
    return made


def _less_mean(tape: Tape, wide: Value, mean: Value, site: Site) -> Value:
    backward = in_turn(
        needs(site.source, ("gradient of the mean, not yet summed", 4 * wide.shape)), same_gradient(wide),
        makes("gradient of the mean", site.source, mean),
    )  # fmt: skip
    return run(tape, (wide, mean), f"{site.name}: its input less the mean", site.source, dtype=4, backward=backward)


def _norm_by_unsloth(tape: Tape, value: Value, rows: Size, site: Site) -> Value:
    """Run Unsloth's norm. Autograd saves its input and a number per row; the backward overwrites the output's gradient."""
    root, at = (f"{site.name}: reciprocal root mean square", 4 * rows), site._replace(source=FUSED_NORM)
    return run(tape, value, f"output of the {site.name}", at, saved=(value,), keeps=(root,))


def _norm_by_liger(tape: Tape, value: Value, weight: Size, rows: Size, site: Site) -> Value:
    """Run Liger's norm. Like Unsloth's, but each multiprocessor sums a weight gradient in fp32, even of a frozen weight."""
    root, at = (f"{site.name}: reciprocal root mean square", 4 * rows), site._replace(source=LIGER_NORM)
    parts = f"{site.name}: gradients of its weight by multiprocessor", 4 * PROCESSORS * weight
    backward = in_turn(needs(LIGER_NORM, parts), trains(weight), same_gradient(value))
    return run(tape, value, f"output of the {site.name}", at, saved=(value,), keeps=(root,), backward=backward, weights="own")


def gated_by_liger(tape: Tape, gate: Value, up: Value, reason: str) -> Value:
    """``silu(gate) * up`` in one kernel. Autograd saves both, and the backward overwrites them with their gradients."""
    return run(tape, (gate, up), reason, LIGER_GATE, saved=(gate, up), backward=overwrites(gate, up))


def _norm_in_one_operator(tape: Tape, value: Value, weight: Size, rows: Size, site: Site, *, is_layer: bool) -> Value:
    """Run a norm in one operator. Autograd saves its input, and LayerNorm's mean and deviation or RMSNorm's root per token."""
    name = site.name
    made = tensor(tape, f"output of the {name}", value.dtype, value.shape, site.source)
    if is_layer:
        kept = tape.make(TENSOR, f"{name}: mean and reciprocal standard deviation", 8 * rows, site.source, STATISTICS)
    else:
        kept = tape.make(TENSOR, f"{name}: reciprocal root mean square", 4 * rows, site.source)
    backward = in_turn(trains(*(weight,) * (1 + is_layer)), makes(f"gradient through the {name}", site.source, value))
    read = tuple(Beside(f"{name}: its {one}", r * weight) for one in (("weight", "bias") if is_layer else ("weight",)))
    tape.add(name, (made,), (value, kept), backward, of=tape.with_weight(value), place=site.place, beside=read)
    tape.drop(kept)
    return made


def _rms_norm(
    tape: Tape, value: Value, kind: Norm, weight: Size, rows: Size, site: Site, means: list[Store] | None
) -> Value:  # fmt: skip
    """Run an RMSNorm. Autograd saves its input in fp32, the reciprocal root mean square, and the weight's other factor."""
    wide = cast(tape, value, 4, site._replace(name=f"{site.name}: its input"))
    by_power = kind.kind.startswith("power")
    unnamed = kind.kind in ("one plus weight", "cast, then weighted, unnamed", "no weight")
    scale, named = _reciprocal_root(tape, wide, rows, site, names_mean=not unnamed, by_power=by_power)
    normal = _times_root(tape, wide, scale, site)
    tape.release(wide, scale)
    if kind.kind in ("cast, then weighted, unnamed", "no weight"):
        return _cast_and_weighted(tape, normal, value.dtype, weight if kind.kind != "no weight" else None, site)
    if by_power:
        return _weighted_by_power(tape, normal, value.dtype, 0 if kind.kind == "power, no weight" else weight, site, named)
    if kind.kind == "cast, then weighted":
        narrow = cast(tape, normal, value.dtype, site._replace(name=f"{site.name}: normalised input"), NORMALISED)
        made = weighted(tape, narrow, () if tape.mode.weights_frozen else (narrow,), weight, site)
        tape.release(narrow, normal)  # the fp32 one has a variable until the norm returns
    else:
        copied = not tape.is_wide(r) if kind.kind == "copied weight, then cast" else None
        made = _weighted_in_32_bits(
            tape, normal, value.dtype, weight, site, one_plus=kind.kind == "one plus weight", copied=copied, named=True
        )
    if means is None:
        tape.drop(*named)
    else:
        means += named
    return made


def _cast_and_weighted(tape: Tape, normal: Value, dtype: Width, weight: Size | None, site: Site) -> Value:
    """The rest of Llama 4's norms: a cast, and a product with the weight if there is one."""
    narrow = cast(tape, normal, dtype, site._replace(name=f"{site.name}: normalised input"), NORMALISED)
    tape.release(normal)
    if weight is None:
        return narrow
    made = weighted(tape, narrow, () if tape.mode.weights_frozen else (narrow,), weight, site)
    tape.release(narrow)
    return made


def _weighted_in_32_bits(
    tape: Tape, normal: Value, dtype: Width, weight: Size, site: Site, *, one_plus: bool = False, copied: bool | None = None,
    named: bool = False,
) -> Value:  # fmt: skip
    """Multiply by the weight, or by 1 + weight, then cast to ``dtype``. 1 + weight is a tensor, which the product saves.

    ``copied``: so is a cast copy of the weight, where there is one; None: the weight multiplies in its own dtype. ``named``: a
    variable of the normalised input lives to the end, which 1 + weight has not.
    """
    name = site.name
    words = f"{name}: one plus its weight, fp32" if one_plus else f"{name}: its weight in fp32"
    plus = (tape.make(TENSOR, words, 4 * weight, site.source),) if one_plus or copied else ()
    scaled = weighted(tape, normal, plus if tape.mode.weights_frozen else (normal, *plus), weight, site, plus=bool(plus))
    tape.drop(*plus)
    one_plus = one_plus or (copied is not None and not named)
    if one_plus:
        tape.release(normal)  # its variable holds the product from here on
    made = cast(tape, scaled, dtype, site._replace(name=f"output of the {name}"))
    tape.release(scaled)
    if not one_plus:
        tape.release(normal)
    return made


def _weighted_by_power(
    tape: Tape, normal: Value, dtype: Width, weight: Size | int, site: Site, named: tuple[Store, ...]
) -> Value:  # fmt: skip
    """The rest of Gemma 4's norm. The mean's variable ends with the function that multiplies by the root."""
    tape.drop(*named)
    if isinstance(weight, int):
        made = cast(tape, normal, dtype, site._replace(name=f"output of the {site.name}"))
        tape.release(normal)
        return made
    return _weighted_in_32_bits(tape, normal, dtype, weight, site, copied=not tape.is_wide(r))


def _reciprocal_root(
    tape: Tape, wide: Value, rows: Size, site: Site, *, names_mean: bool, by_power: bool = False
) -> tuple[Value, tuple[Store, ...]]:  # fmt: skip
    """Return ``rsqrt(mean(x²) + eps)``, and the mean where it has a variable. ``pow`` saves x, ``rsqrt`` its result.

    ``by_power``: as a power of the mean, which saves the mean.
    """
    square = tensor(tape, f"{site.name}: square of its input", 4, wide.shape, site.source)

    def power(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.temporary("derivative of pow, fp32", 8 * wide.shape, site.source, pieces=2)
        return [(wide, gradient(tape, wide, "gradient of the norm's input, fp32", site.source))]

    tape.add(site.name, (square,), (wide,), power, of=(wide,), place=site.place)
    mean = tape.make(TEMPORARY, f"{site.name}: mean of its input's squares", 4 * rows, site.source)
    tape.release(square)
    root = tensor(tape, f"{site.name}: reciprocal root mean square", 4, rows, site.source)
    backward = makes("gradient of the squared input", site.source, square)
    saved = (mean,) if by_power else (root,)
    tape.add(f"{site.name}: reciprocal root", (root,), saved, backward, of=(square,), place=site.place)
    if names_mean:
        return root, (mean,)
    tape.drop(mean)
    return root, ()


def _times_root(tape: Tape, wide: Value, root: Value, site: Site) -> Value:
    made = tensor(tape, f"{site.name}: normalised input", 4, wide.shape, site.source, NORMALISED)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        direct = gradient(tape, wide, "gradient of the input beside its square, fp32", site.source)
        tape.temporary("gradient of the root mean square, not yet summed", 4 * wide.shape, site.source)
        tape.read()
        return [(wide, direct), (root, gradient(tape, root, "gradient of the reciprocal root mean square", site.source))]

    saved = (wide, root)
    tape.add(f"{site.name}: product with the root", (made,), saved, backward, of=(wide,), place=site.place)
    return made


def weighted(tape: Tape, value: Value, saved: Saved, weight: Size, site: Site, *, plus: bool = False) -> Value:
    """Multiply by the weight, which has the residual stream's dtype: the product has the wider dtype of the two.

    ``plus``: an fp32 copy of the weight, or one plus it, which is among ``saved``, takes its place.
    """
    frozen = tape.mode.weights_frozen
    made = tensor(tape, f"output of the {site.name}", wider(tape, value.dtype, r), value.shape, site.source)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        followed, reason = tape.follows(value), "gradient of the normalised input"
        passed = tape.make(GRADIENT, reason, made.dtype * made.shape, site.source) if followed else None
        if not frozen:
            unsummed = ("gradient of the norm's weight, not yet summed", made.dtype * made.shape, site.source)
            uncast = ("gradient of the norm's weight, not yet cast", 4 * weight, site.source)
            wide_copy = plus and not tape.is_wide(r)
            tape.weight_gradient(weight, unsummed=unsummed, read=stores_of(saved), uncast=uncast if wide_copy else None)
        return [] if passed is None else [(value, as_narrow(tape, value, passed, made, site.source))]

    of = (value,) if frozen else None
    read = () if plus else (Beside(f"{site.name}: its weight", r * weight),)
    name = f"{site.name}: product with its weight"
    tape.add(name, (made,), saved, backward, of=of, place=site.place, saves_weight=frozen, beside=read)
    return made
