"""The operators that blocks are written in, each with what it allocates, what it saves, and what its backward makes.

Tensors keep transformers' names; sizes are those of the eager operators of torch 2.13.
"""

from typing import NamedTuple

from zeroplan.expr import NOTHING, Size
from zeroplan.ledger import PLAIN, Kind, Role, Tag
from zeroplan.transformer.blocks import Place
from zeroplan.transformer.families.attention import CUDA_ALONE
from zeroplan.transformer.families.norms import NORMALISED, STATISTICS, NormNames
from zeroplan.transformer.families.tape import CAST_BY_CUDA, Arriving, Backward, Do, Site, Store, Tape, Value, Width
from zeroplan.transformer.symbols import T, b, e, h, r

TENSOR, GRADIENT, TEMPORARY = Kind.ACTIVATIONS, Kind.ACTIVATION_GRADIENTS, Kind.TEMPORARY


def tensor(tape: Tape, reason: str, dtype: Width, shape: Size, source: str, tag: Tag = PLAIN) -> Value:
    """Allocate a tensor that gradients flow to."""
    return Value(tape.make(TENSOR, reason, dtype * shape, source, tag), dtype, shape)


def gradient(tape: Tape, value: Value, reason: str, source: str, tag: Tag = PLAIN) -> Store:
    """Allocate the gradient of a tensor."""
    return tape.make(GRADIENT, reason, value.dtype * value.shape, source, tag)


def through(value: Value, passed: Store) -> tuple[Value, Store]:
    """Hand a gradient on as it is."""
    passed.holds += 1
    return value, passed


def passes(*values: Value) -> Backward:
    """The backward that hands its gradient on as it is, to each of ``values``."""
    return lambda _tape, taken: [through(value, taken[0]) for value in values]


def makes(reason: str, source: str, *values: Value, beside: tuple[str, Size] | None = None) -> Backward:
    """The backward that makes a gradient of each of ``values``; ``beside`` it, and before, a temporary: its reason and size."""

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        if beside is not None:
            tape.temporary(*beside, source)
        return [(value, gradient(tape, value, reason, source)) for value in values if tape.follows(value)]

    return backward


def wider(tape: Tape, first: Width, second: Width) -> Width:
    """The dtype of a result of two; the first where both are alike."""
    return second if tape.is_wide(second) and not tape.is_wide(first) else first


def cast(tape: Tape, value: Value, dtype: Width, site: Site, tag: Tag = PLAIN) -> Value:
    """``Tensor.to``: the same tensor where it has that dtype already, else a copy. The name for ``value`` stays."""
    if tape.is_wide(value.dtype) == tape.is_wide(dtype):
        tape.hold(value.store)
        return value
    suffix = {4: " in fp32", e: ", cast"}.get(dtype, "")
    made = tensor(tape, f"{site.name}{suffix}", dtype, value.shape, site.source, tag)

    backward = makes(f"gradient through the {site.name}", site.source, value)
    tape.add(f"{site.name}: cast", (made,), (), backward, of=(value,), place=site.place)
    return made


def view(tape: Tape, value: Value, site: Site) -> Value:
    """``Tensor.view``: the same memory under a name of its own, to which a gradient comes before it comes to the whole."""
    made = Value(tape.hold(value.store), value.dtype, value.shape)
    tape.add(f"{site.name}: view", (made,), (), passes(value), of=(value,), place=site.place)
    return made


def add(tape: Tape, first: Value, second: Value, reason: str, site: Site) -> Value:
    """``first + second`` in the wider dtype; the gradient goes to both, cast for one that is narrower."""
    made = tensor(tape, reason, wider(tape, first.dtype, second.dtype), first.shape, site.source)

    def backward(tape: Tape, taken: list[Store]) -> Arriving:
        return [narrowed(tape, value, taken[0], made, site) for value in (first, second) if tape.follows(value)]

    tape.add(site.name, (made,), (), backward, of=(first, second), place=site.place)
    return made


def as_narrow(tape: Tape, value: Value, passed: Store, made: Value, source: str) -> Store:
    """A gradient in the dtype of its tensor: cast where an operator has made it in the wider one of its result."""
    if tape.is_wide(value.dtype) == tape.is_wide(made.dtype):
        return passed
    tape.scratch.append(passed)
    return gradient(tape, value, f"{passed.reason}, cast", source, CUDA_ALONE if made.dtype == CAST_BY_CUDA else PLAIN)


def narrowed(tape: Tape, value: Value, taken: Store, made: Value, site: Site) -> tuple[Value, Store]:
    """Hand on the gradient of a sum to one of its terms, cast where that is narrower."""
    if tape.is_wide(value.dtype) == tape.is_wide(made.dtype):
        return through(value, taken)
    return value, gradient(tape, value, "gradient of the residual stream, cast for the branch", site.source)


def linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, addmm: bool = False
) -> Value:  # fmt: skip
    """``nn.Linear`` over ``reads`` features, making ``width``; under autocast with casts of its input, weight and bias."""
    with tape.owning():
        if tape.manner.linear is not None:
            return tape.manner.linear(tape, value, width, site, reads=reads, bias=bias)
        return trained_linear(tape, value, width, site, reads=reads, bias=bias, addmm=addmm)


def trained_linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, addmm: bool = False
) -> Value:  # fmt: skip
    """``nn.Linear`` whose weight is trained.

    Autocast makes the copies from the last argument to the first, so that the gradient of the input is cast first. ``addmm`` is
    of a layer that calls it with the bias first (``Conv1D`` of transformers), whose gradient is therefore cast first.
    """
    matrix = reads * width
    weights = [width, matrix] if bias else [matrix]
    kept = matrix if tape.follows(value) else None  # the weight's copy is needed for the gradient of the input alone
    before = weights[addmm:] if tape.autocast else []
    casts = [
        _weight(tape, elements, site, tracked=elements is kept, of="weight" if elements is matrix else "bias")
        for elements in before
    ]
    given = cast(tape, value, e, Site(f"input of the {site.name}", site.source))
    if addmm and tape.autocast:
        casts.append(_weight(tape, width, site, tracked=False, of="bias"))
    made = tensor(tape, f"output of the {site.name}", e, T * width, site.source, Tag(Role.OUTPUT, site.module))
    if not bias:
        tape.product(made.store)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        reason = f"gradient through the {site.name}"
        arriving = [(given, gradient(tape, given, reason, site.source))] if tape.follows(given) else []
        reason = f"gradient of the {site.name}'s weights, not yet cast"
        for elements in (matrix, width) if bias else (matrix,):  # autograd sums a bias's gradient up when the operator is done
            if elements is width:
                tape.used(given.store)
            copy = next((one for one in casts if one.shape is elements), None)
            if copy is None:
                tape.weight_gradient(elements)
            else:
                arriving.append((copy, tape.make(TEMPORARY, reason, e * elements, site.source)))
        return arriving

    tape.add(site.name, (made,), (given.store,), backward, of=None, cast=kept if casts else None, place=site.place)
    tape.release(given)
    return made


def _weight(tape: Tape, elements: Size, site: Site, *, tracked: bool, of: str) -> Value:
    """Autocast's copy of a weight or bias: its gradient is made in 16 bits and then cast.

    The engine counts the bytes of a weight's copy, which is kept for the backward; that of a bias goes with the forward.
    """
    if tracked:
        tape.casts.append(elements)
        tape.course.deeds.append((Do.CAST, elements))
    else:
        tape.cached.append(elements)
    made = Value(Store(TEMPORARY, "", NOTHING, ""), e, elements)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.weight_gradient(elements)
        return []

    tape.add(f"{site.name}: cast of the {of} gradient", (made,), (), backward, of=None)
    return made


def convolution(tape: Tape, value: Value, width: Size, taps: Size, site: Site) -> Value:
    """``F.conv1d`` of each of ``width`` channels alone over so many tokens, filled up at both ends and cut to the sequence.

    Its input comes in the weight's dtype, of which autocast makes its own.
    """
    elements = width * taps
    wide = cast(tape, value, r, Site(f"input of the {site.name}, in its weight's dtype", site.source))
    weight = _weight(tape, elements, site, tracked=True, of="weight") if tape.autocast else None
    given = cast(tape, wide, e, Site(f"input of the {site.name}", site.source))
    made = tensor(tape, f"output of the {site.name}", e, (T + b * (taps - 1)) * width, site.source)
    tape.release(wide)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        arriving = [(given, gradient(tape, given, f"gradient through the {site.name}", site.source))]
        if weight is None:
            tape.weight_gradient(elements)
            return arriving
        reason = f"gradient of the {site.name}'s weight, not yet cast"
        return [*arriving, (weight, tape.make(TEMPORARY, reason, e * elements, site.source))]

    cast_of = None if weight is None else elements
    tape.add(site.name, (made,), (given.store,), backward, of=None, cast=cast_of, place=site.place)
    (cut,) = slices(tape, made, (T * width,), Site(f"sequence in the {site.name}'s output", site.source))
    tape.release(given, made)
    return cut


class NormAs(NamedTuple):
    """How a family writes RMSNorm: ``one_plus`` scales by 1 + weight in fp32 (Gemma), else by the weight.

    ``wide``: by the weight before the result is cast (gpt-oss), where Llama casts first.
    """

    one_plus: bool
    source: str
    wide: bool = False


def rms_norm(
    tape: Tape,
    value: Value,
    name: str,
    kind: NormAs,
    *,
    weight: Size = h,
    rows: Size = T,
    place: Place | None = None,
) -> Value:
    """RMSNorm from single operators, in fp32; ``weight`` is its weight's elements."""
    with tape.owning():
        return _rms_norm(tape, value, name, kind, weight=weight, rows=rows, place=place)


def _rms_norm(
    tape: Tape, value: Value, name: str, kind: NormAs, *, weight: Size, rows: Size, place: Place | None
) -> Value:  # fmt: skip
    at, module = place or Place()
    site = Site(name, kind.source, module, at)
    wide = cast(tape, value, 4, site._replace(name=f"{name}: its input"))
    scale, named = _scale(tape, wide, rows, site, names_mean=not kind.one_plus)
    normal = _times(tape, wide, scale, site)
    tape.release(wide, scale)
    if kind.one_plus or kind.wide:
        made = _scaled_in_32_bits(tape, normal, value.dtype, kind, weight, site)
    else:
        narrow = cast(tape, normal, value.dtype, site._replace(name=f"{name}: normalised input"), NORMALISED)
        made = _weighted(tape, narrow, () if tape.manner.norms_frozen else (narrow.store,), weight, site)
        tape.release(narrow, normal)  # the fp32 one has a name until the norm returns
    tape.drop(*named)
    return made


def _scaled_in_32_bits(tape: Tape, normal: Value, dtype: Width, kind: NormAs, weight: Size, site: Site) -> Value:
    """Scale by the weight, or by one plus it, before the cast to ``dtype``; one plus a weight is a tensor, which is saved."""
    name = site.name
    plus = (tape.make(TENSOR, f"{name}: one plus its weight, fp32", 4 * weight, kind.source),) if kind.one_plus else ()
    scaled = _weighted(tape, normal, plus if tape.manner.norms_frozen else (normal.store, *plus), weight, site)
    tape.drop(*plus)
    if kind.one_plus:
        tape.release(normal)  # its name stands for the product from here on
    made = cast(tape, scaled, dtype, site._replace(name=f"output of the {name}"))
    tape.release(scaled)
    if not kind.one_plus:
        tape.release(normal)
    return made


def _scale(tape: Tape, wide: Value, rows: Size, site: Site, *, names_mean: bool) -> tuple[Value, tuple[Store, ...]]:
    """``rsqrt(mean(x²) + eps)``, of which the root is saved and pow saves its base; and the mean, where it has a name."""
    square = tensor(tape, f"{site.name}: square of its input", 4, wide.shape, site.source)

    def power(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("derivative of pow, fp32", 8 * wide.shape, site.source, pieces=2)
        return [(wide, gradient(tape, wide, "gradient of the norm's input, fp32", site.source))]

    tape.add(site.name, (square,), (wide.store,), power, of=(wide,), place=site.place)
    mean = tape.make(TEMPORARY, f"{site.name}: mean of its input's squares", 4 * rows, site.source)
    tape.release(square)
    root = tensor(tape, f"{site.name}: reciprocal root mean square", 4, rows, site.source)

    backward = makes("gradient of the squared input", site.source, square)
    tape.add(f"{site.name}: reciprocal root", (root,), (root.store,), backward, of=(square,), place=site.place)
    if names_mean:
        return root, (mean,)
    tape.drop(mean)
    return root, ()


def _times(tape: Tape, wide: Value, root: Value, site: Site) -> Value:
    made = tensor(tape, f"{site.name}: normalised input", 4, wide.shape, site.source, NORMALISED)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        direct = gradient(tape, wide, "gradient of the input beside its square, fp32", site.source)
        tape.temporary("gradient of the root mean square, not yet summed", 4 * wide.shape, site.source)
        return [(wide, direct), (root, gradient(tape, root, "gradient of the reciprocal root mean square", site.source))]

    saved = (wide.store, root.store)
    tape.add(f"{site.name}: product with the root", (made,), saved, backward, of=(wide,), place=site.place)
    return made


def _weighted(tape: Tape, value: Value, saved: tuple[Store, ...], weight: Size, site: Site) -> Value:
    """Multiply by the weight, which has the residual stream's dtype: the product is in the wider one of the two."""
    frozen = tape.manner.norms_frozen
    made = tensor(tape, f"output of the {site.name}", wider(tape, value.dtype, r), value.shape, site.source)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        followed, reason = tape.follows(value), "gradient of the normalised input"
        passed = tape.make(GRADIENT, reason, made.dtype * made.shape, site.source) if followed else None
        if not frozen:
            unsummed = ("gradient of the norm's weight, not yet summed", made.dtype * made.shape, site.source)
            tape.weight_gradient(weight, unsummed=unsummed, read=saved)
        return [] if passed is None else [(value, as_narrow(tape, value, passed, made, site.source))]

    of = (value,) if frozen else None
    tape.add(f"{site.name}: product with its weight", (made,), saved, backward, of=of, place=site.place)
    return made


def layer_norm(tape: Tape, value: Value, names: NormNames, source: str) -> Value:
    """``torch.nn.LayerNorm``, one operator: it saves its input, and a mean and a deviation per token, fp32 on CUDA."""
    with tape.owning():
        return _layer_norm(tape, value, names, source)


def _layer_norm(tape: Tape, value: Value, names: NormNames, source: str) -> Value:
    name = names.name
    made = tensor(tape, f"output of the {name}", value.dtype, value.shape, source)
    kept = tape.make(TENSOR, names.scale, 8 * T, source, STATISTICS)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.weight_gradient(h)
        tape.weight_gradient(h)
        return [(value, gradient(tape, value, f"gradient through the {name}", source))] if tape.follows(value) else []

    tape.add(name, (made,), (value.store, kept), backward, of=None, place=names.place)
    tape.drop(kept)
    return made


def rotary(
    tape: Tape, value: Value, site: Site, *, part: Size | None = None, tables: Width = r, saved: tuple[Store, ...] = ()
) -> Value:  # fmt: skip
    """``x·cos + rotate_half(x)·sin``, the tables in the residual stream's dtype or another.

    ``part`` is what is turned of it, where that is not all; ``saved`` are tables that are the block's own.
    """
    dtype = wider(tape, value.dtype, tables)
    turned_part = value.shape if part is None else part
    direct = tape.make(TEMPORARY, f"{site.name} times cos", dtype * turned_part, site.source)
    turned = tape.make(TEMPORARY, f"{site.name}, halves exchanged", value.dtype * turned_part, site.source)
    times_sin = tape.make(TEMPORARY, f"{site.name} times sin", dtype * turned_part, site.source)
    tape.drop(turned)
    made = tensor(tape, site.name, dtype, value.shape, site.source)
    tape.drop(direct, times_sin)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        given = gradient(tape, value, f"gradient of the {site.name}", site.source)
        tape.temporary("gradients of the exchanged halves", (dtype + value.dtype) * turned_part, site.source, pieces=2)
        return [(value, given)]

    tape.add(f"rotary positions of the {site.name}", (made,), saved, backward, of=(value,))
    return made


def slices(tape: Tape, whole: Value, shapes: tuple[Size, ...], site: Site) -> tuple[Value, ...]:
    """``x[..., a:b]`` for each shape: views, whose gradients are each put into zeros of the whole's size."""
    views = tuple(Value(tape.hold(whole.store), whole.dtype, shape) for shape in shapes)
    for view in views:
        tape.add(site.name, (view,), (), makes(f"gradient of the {site.name}", site.source, whole), of=(whole,))
    return views


def chunk(tape: Tape, whole: Value, shapes: tuple[Size, ...], site: Site) -> tuple[Value, ...]:
    """``x.chunk(n, dim=-1)``: views, whose gradients are joined."""
    views = tuple(Value(tape.hold(whole.store), whole.dtype, shape) for shape in shapes)

    tape.add(site.name, views, (), makes(f"gradients of the {site.name}, joined", site.source, whole), of=(whole,))
    return views


def joined(tape: Tape, parts: tuple[Value, ...], reason: str, shape: Size, site: Site) -> Value:
    """``cat`` in the wider dtype; the gradients are parts of the whole one, cast for a part that is narrower."""
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = wider(tape, dtype, part.dtype)
    made = tensor(tape, reason, dtype, shape, site.source)

    def backward(tape: Tape, taken: list[Store]) -> Arriving:
        return [narrowed(tape, part, taken[0], made, site) for part in parts]

    tape.add(site.name, (made,), (), backward, of=parts)
    return made


def pointwise(tape: Tape, value: Value, reason: str, site: Site, *, saves_result: bool = False) -> Value:
    """An activation in one operator: SiLU and GELU save their input, ReLU its result."""
    made = tensor(tape, reason, value.dtype, value.shape, site.source)

    backward = makes(f"gradient of the input of {site.name}", site.source, value)
    saved = made.store if saves_result else value.store
    tape.add(site.name, (made,), (saved,), backward, of=(value,), place=site.place)
    return made


def product(tape: Tape, first: Value, second: Value, reason: str, site: Site) -> Value:
    """``first * second`` in the wider dtype; each is saved for the gradient of the other, where autograd follows that.

    The gradient of a factor that is narrower is made in the wider dtype, and cast when the operator is done.
    """
    made = tensor(tape, reason, wider(tape, first.dtype, second.dtype), first.shape, site.source)
    saved = factors(tape, (first, (first.store,)), (second, (second.store,)))

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        followed = [one for one in (first, second) if tape.follows(one)]
        name = f"gradient of a factor of the {site.name}"
        bare = [tape.make(GRADIENT, name, wider(tape, one.dtype, made.dtype) * one.shape, site.source) for one in followed]
        if any(tape.is_wide(one.dtype) != tape.is_wide(made.dtype) for one in followed):
            tape.used(*saved)
        return [(one, as_narrow(tape, one, wide, made, site.source)) for one, wide in zip(followed, bare, strict=True)]

    tape.add(site.name, (made,), saved, backward, of=(first, second), place=site.place)
    return made


def matmul(
    tape: Tape, first: Value, second: Value, made_as: tuple[str, Size], site: Site, copies: tuple[Store, ...] = ()
) -> Value:  # fmt: skip
    """``first @ second`` of operands of one dtype, or of autocast's copies of them; what is made is its name and elements.

    ``copies``: what the kernel reads in place of operands whose rows do not lie in order, and saves.
    """
    reason, shape = made_as
    dtype = e if tape.autocast else first.dtype
    right = cast(tape, second, dtype, Site(f"second factor of the {site.name}", site.source))
    left = cast(tape, first, dtype, Site(f"first factor of the {site.name}", site.source))
    made = tensor(tape, reason, dtype, shape, site.source)
    backward = makes(f"gradient of a factor of the {site.name}", site.source, right, left)
    saved = factors(tape, (left, (left.store,)), (right, (right.store,)))
    tape.add(site.name, (made,), (*saved, *copies), backward, of=(left, right), place=site.place)
    tape.release(left, right)
    return made


Factor = tuple[Value, tuple[Store, ...]]


def factors(tape: Tape, first: Factor, second: Factor) -> tuple[Store, ...]:
    """What a product saves of its factors: of each what is kept of it, for the gradient of the other."""
    return (*(first[1] if tape.follows(second[0]) else ()), *(second[1] if tape.follows(first[0]) else ()))


def raised(tape: Tape, value: Value, reason: str, site: Site) -> Value:
    """Add a number. The name for ``value`` stays; the gradient passes as it is."""
    made = tensor(tape, reason, value.dtype, value.shape, site.source)
    tape.add(site.name, (made,), (), passes(value), of=(value,), place=site.place)
    return made


def multiplied(tape: Tape, value: Value, site: Site) -> Value:
    """Multiply by a number. The name for ``value`` stays."""
    made = tensor(tape, site.name, value.dtype, value.shape, site.source)
    backward = makes(f"gradient through the {site.name}", site.source, value)
    tape.add(site.name, (made,), (), backward, of=(value,), place=site.place)
    return made


def scaled(tape: Tape, value: Value, reason: str, site: Site) -> Value:
    """Multiply by a number; the name goes over to the product."""
    made = tensor(tape, reason, value.dtype, value.shape, site.source)

    tape.add(site.name, (made,), (), makes("gradient of the scores", site.source, value), of=(value,), place=site.place)
    tape.release(value)
    return made
