"""Derives a module's profile: its passes taken apart at a few shapes, and exact polynomials through what was counted.

One block of each kind stands for all of its kind, for several sequences and, since some modules treat it otherwise, for one.
What follows no polynomial is said by name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from zeroplan.errors import MeasurementError, ZeroplanError
from zeroplan.spec.profile import (
    Amount,
    Flash,
    Handed,
    Modules,
    Part,
    Point,
    Profile,
    ProfiledBlock,
    ProfiledPass,
    Run,
    Tensor,
    Variant,
)
from zeroplan.spec.recipe import Engine, Precision, Recompute
from zeroplan.verify.environment import environment
from zeroplan.verify.profiling.anatomy import Anatomy, BlockAnatomy, HandedOn, Instant, Manner, Piece, anatomy
from zeroplan.verify.profiling.polynomials import (
    MULTIPLES,
    OF_MORE,
    OF_NOTHING,
    OF_ONE,
    OF_SEQUENCES,
    Fit,
    Shape,
    covers,
    less,
    padded,
    total,
    value,
)
from zeroplan.verify.profiling.subject import Subject
from zeroplan.verify.training.modules import prefixes_of, shapes_of
from zeroplan.verify.training.run import fake_tensors
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.cycles import collected_when_told
from zeroplan.verify.watching.tracker import Tracker

_UNIT = 128
"""Lengths that no kernel rounds; the odd one that is held out shows whether one does."""
_FAR = 64
"""How many units the length has at which it is asked whether short sequences are computed as long ones."""


class Wanted(NamedTuple):
    """For which engines, precisions and kinds of recomputation."""

    engines: tuple[Engine, ...] = ("fsdp2", "ddp")
    precisions: tuple[Precision, ...] = ("bf16-mixed", "bf16", "fp32")
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    shortest: int | None = None
    """For sequences of so many tokens and more, where shorter ones are computed otherwise."""


def manners(wanted: Wanted) -> tuple[Manner, ...]:
    """How the module is executed under what is wanted, on the pretended GPU."""
    found: list[Manner] = []
    for recompute in wanted.recompute:
        for engine in wanted.engines:
            for precision in wanted.precisions:
                autocast = engine == "ddp" and precision.endswith("mixed")
                found.append(Manner(4 if precision == "fp32" else 2, autocast=autocast, kernels="cuda", recompute=recompute))
    return tuple(dict.fromkeys(found))


def profile(subject: Subject, wanted: Wanted, *, say: Callable[[str], None]) -> Profile:
    """Trace and derive; ``say`` is told how far it is.

    Raises :class:`~zeroplan.errors.MeasurementError` for modules that one block of each kind cannot stand for.
    """
    with collected_when_told():  # once for all passes, each of which is followed by a collection
        return _profile(subject, wanted, say)


def _profile(subject: Subject, wanted: Wanted, say: Callable[[str], None]) -> Profile:
    tracer = _Tracer(subject, say, wanted.shortest)
    every = manners(wanted)
    whole = tracer.structure(every[0])
    variants = tuple(tracer.variant(manner, whole) for manner in every)
    cast = frozenset(name for one in tracer.first.values() for name in one.cast)
    tail = next(iter(tracer.first.values())).tail - {
        whole.tied
    }  # autograd may have added the embedding's gradient to the head's
    kinds, runs = whole.runs()
    return Profile(
        name=subject.name,
        source=subject.source,
        packages={name: environment().packages[name] for name in ("torch", "transformers") if name in environment().packages},
        attention=subject.attention,
        embeddings=tuple(_tensor(name, one, cast) for name, one in whole.outside if name not in tail),
        runs=runs,
        kinds={
            kind: tuple(_tensor(name, one, cast, whole.prefix(at)) for name, one in whole.inside(at))
            for kind, at in kinds.items()
        },
        tail=tuple(_tensor(name, one, cast) for name, one in whole.outside if name in tail),
        order=whole.order,
        modules=_modules(next(iter(tracer.first.values())), whole),
        tied_head=whole.tied,
        buffer_bytes=whole.buffer_bytes,
        seq_len=tracer.fixed_length,
        shortest=1 if tracer.fixed_length is not None else tracer.shortest,
        variants=variants,
    )


def _modules(seen: Anatomy, whole: "_Structure") -> Modules:
    inside = [one for one in seen.called if any(f"{one.name}.".startswith(prefix) for prefix in whole.names)]
    outside = [one for one in seen.called if one not in inside]
    before = [one for one in outside if not one.holds_blocks and not one.after_blocks]
    return Modules(
        holding=tuple(one.name for one in outside if one.holds_blocks),
        before=tuple(one.name for one in before),
        after=tuple(one.name for one in outside if one.after_blocks),
        kinds={
            kind: tuple(one.name.removeprefix(whole.names[at]) for one in inside if one.name.startswith(whole.names[at]))
            for kind, at in whole.traced.items()
        },
        unfollowed=tuple(one.name for one in before if not one.follows),
        unnoticed=tuple(one.name for one in before if not one.noticed),
        tied=next((one.name for one in outside if one.after_blocks and one.shares), None),
    )


def _tensor(name: str, shape: tuple[int, ...], cast: frozenset[str], prefix: str = "") -> Tensor:
    return Tensor(name=name.removeprefix(prefix), shape=shape or (1,), autocast=name in cast)


# --- the module's structure ---------------------------------------------------------------------------------------------


class _Structure(NamedTuple):
    """Parameters in order with their shapes, blocks with their kinds."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    names: tuple[str, ...]
    """Of the blocks, as a prefix."""
    kinds: tuple[str, ...]
    traced: dict[str, int]
    """Which of the traced blocks stands for a kind."""
    tied: str | None
    buffer_bytes: int

    @property
    def outside(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, shape) for name, shape in self.parameters if not any(name.startswith(prefix) for prefix in self.names)]

    @property
    def order(self) -> tuple[str, ...]:
        """Parameters outside the blocks as they are registered, and an empty name where the blocks are."""
        inside = [any(name.startswith(prefix) for prefix in self.names) for name, _ in self.parameters]
        names = ["" if within else name for within, (name, _) in zip(inside, self.parameters, strict=True)]
        return tuple(dict.fromkeys(names))

    def prefix(self, at: int) -> str:
        return self.names[at]

    def inside(self, at: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, shape) for name, shape in self.parameters if name.startswith(self.names[at])]

    def runs(self) -> tuple[dict[str, int], tuple[Run, ...]]:
        """Where each kind is first met, and the runs."""
        runs: list[Run] = []
        for kind in self.kinds:
            layers = runs.pop().layers if runs and runs[-1].kind == kind else 0
            runs.append(Run(kind=kind, layers=layers + 1))
        return {kind: self.kinds.index(kind) for kind in self.kinds}, tuple(runs)


def _keys(work: Workload, layer_kinds: tuple[str, ...] | None) -> list[tuple[object, ...]]:
    """What tells kinds of blocks apart before anything runs: class, parameters, and what a configuration says."""
    said = layer_kinds or ("",) * len(work.blocks)
    return [(type(block).__name__, shapes_of(block), kind) for block, kind in zip(work.blocks, said, strict=False)]


def _sizes(block: BlockAnatomy) -> tuple[int, ...]:
    return tuple(sorted(piece.n_bytes for piece in block.kept))


def _tied(work: Workload, names: Sequence[str]) -> str | None:
    """The parameter outside the blocks that stands in two places: the embedding that is the head, too."""
    first: dict[int, str] = {}
    tied = None
    for name, parameter in work.module.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) == name:
            continue
        if any(one.startswith(tuple(names)) for one in (name, known)) or tied is not None:
            raise MeasurementError(f"{known!r} and {name!r} are one parameter; shared by blocks, it cannot be profiled")
        tied = known
    return tied


# --- tracing ------------------------------------------------------------------------------------------------------------


class _Tracer:
    """Takes a subject's passes apart, once per manner and shape."""

    def __init__(self, subject: Subject, say: Callable[[str], None], shortest: int | None) -> None:
        self._subject, self._say = subject, say
        self.fixed_length: int | None = None
        self.first: dict[Manner, Anatomy] = {}
        unit = _UNIT if subject.longest is None else max(1, min(_UNIT, subject.longest // 5))
        least = 0 if shortest is None else -(-shortest // unit) * unit
        self._unit, self._least = unit, least
        self._lengths: tuple[int, ...] = tuple(least + times * unit for times in ((0, 1, 4) if least else (1, 2, 5)))

    @property
    def shortest(self) -> int:
        """The shortest sequences that the profile is of."""
        return max(1, self._least)

    def structure(self, manner: Manner) -> _Structure:
        """Look at the whole module and trace it once, to see which blocks are alike."""
        with fake_tensors(Tracker(), "cpu"):
            whole = self._subject.whole()
            if not whole.blocks:
                raise MeasurementError("the module has no list of blocks (an nn.ModuleList), and is profiled block by block")
            names = prefixes_of(whole.module, whole.blocks)
            keys = _keys(whole, self._subject.layer_kinds)
            tied = _tied(whole, names)
            parameters = shapes_of(whole.module)
            buffers = sum(one.nbytes for one in whole.module.buffers())
        seen = self._probe(manner)
        traced = len(seen.blocks)
        if traced == len(keys):
            keys = [(*key, _sizes(block)) for key, block in zip(keys, seen.blocks, strict=True)]
        named = _named(keys)
        return _Structure(parameters, names, tuple(named), _standing(named[:traced]), tied, buffers)

    def _probe(self, manner: Manner) -> Anatomy:
        """Trace once at a length of ours or, where the module has a length of its own, at that."""
        try:
            return self._anatomy(manner, Shape(2, self._lengths[1]))
        except ZeroplanError:
            raise
        except Exception:  # noqa: BLE001  whatever a user's module says to a length it was not made for
            self._lengths = ()
            found = self._anatomy(manner, Shape(2, 0))
        self.fixed_length = self._own_length()
        return found

    def _own_length(self) -> int:
        with fake_tensors(Tracker(), "cpu"):
            sizes = [tensor.shape for tensor in self._subject.whole().batch.values()]
        return next((int(size[1]) for size in sizes if len(size) > 1), 1)

    def _anatomy(self, manner: Manner, shape: Shape) -> Anatomy:
        return anatomy(lambda: self._subject.make(shape), manner)

    def variant(self, manner: Manner, whole: _Structure) -> Variant:
        """Everything in one manner of execution."""
        width = "autocast" if manner.autocast else f"{8 * manner.element_bytes} bits"
        self._say(f"tracing {width}, kernels {manner.kernels}, recomputation {manner.recompute}")
        one, more = (self._pass(manner, whole, several=several) for several in (False, True))
        return Variant(
            element_bytes=4 if manner.element_bytes == 4 else 2,
            autocast=manner.autocast,
            kernels=manner.kernels,
            recompute=manner.recompute,
            one=one,
            more=more,
        )

    def _pass(self, manner: Manner, whole: _Structure, *, several: bool) -> ProfiledPass:
        shapes, held_out, products = self._shapes(several=several)
        seen = {shape: self._anatomy(manner, shape) for shape in (*shapes, *held_out)}
        self.first.setdefault(manner, seen[shapes[0]])
        found = self._derived(seen, shapes, held_out, products, whole)
        return replace(found, remarks=(*found.remarks, *_unlike(seen[shapes[-1]], whole)))

    def _derived(
        self, seen: dict[Shape, Anatomy], shapes: list[Shape], held_out: list[Shape], products: tuple[str, ...], whole: _Structure
    ) -> ProfiledPass:  # fmt: skip
        """Polynomials for every length or, where odd ones run other operators, for multiples of the unit."""
        try:
            return _Derived(seen, shapes, held_out, products).whole(whole.traced)
        except OtherProgramError:
            even = [shape for shape in held_out if not shape.length % self._unit]
            if even == held_out:
                raise
            found = _Derived(seen, shapes, even, products).whole(whole.traced)
        other = f"lengths that are no multiples of {self._unit} may run other operators, and count as the next multiple"
        return replace(found, counted_by=self._unit, remarks=(*found.remarks, other))

    def _shapes(self, *, several: bool) -> tuple[list[Shape], list[Shape], tuple[str, ...]]:
        """Shapes to solve at, shapes held out, and what can be told apart by them."""
        counts, other = ((2, 3), 5) if several else ((1,), 1)
        if not self._lengths:
            products = OF_SEQUENCES if several else OF_NOTHING
            return [Shape(count, 0) for count in counts], [Shape(other, 0)] if several else [], products
        unit = self._unit
        far = self._least + _FAR * _UNIT
        far = far if self._subject.longest is None else min(self._subject.longest, far)
        odd = (self._least + unit + unit // 3, self._least + 2 * unit + unit // 2 + unit // 8 + 1)
        held_out = [Shape(counts[-1], far // unit * unit), *(Shape(other, length) for length in odd)]
        return [Shape(count, length) for count in counts for length in self._lengths], held_out, OF_MORE if several else OF_ONE


def _unlike(seen: Anatomy, whole: _Structure) -> Iterator[str]:
    """Blocks of one kind must keep and peak alike."""
    for at, block in enumerate(seen.blocks):
        kind = whole.kinds[at]
        like = seen.blocks[whole.traced[kind]]
        if block.kept_bytes != like.kept_bytes or _peak(block) > _peak(like):
            yield f"block {at + 1} takes more, or keeps another number of bytes, than the {kind} that stands for it"


def _peak(block: BlockAnatomy) -> int:
    return max(one.saved + one.working for one in block.backward)


def _named(keys: Sequence[tuple[object, ...]]) -> list[str]:
    """Kinds by the name of their class, numbered where several have one class."""
    distinct = list(dict.fromkeys(keys))
    classes = [str(key[0]) for key in distinct]
    names = {
        key: cls if classes.count(cls) == 1 else f"{cls}_{classes[:at].count(cls) + 1}"
        for at, (key, cls) in enumerate(zip(distinct, classes, strict=True))
    }
    return [names[key] for key in keys]


def _standing(kinds: Sequence[str]) -> dict[str, int]:
    """Which block stands for its kind: one in the middle, neither the first nor the last where there are others."""
    places: dict[str, list[int]] = {}
    for at, kind in enumerate(kinds):
        places.setdefault(kind, []).append(at)
    inner = {kind: [at for at in found if 0 < at < len(kinds) - 1] or found for kind, found in places.items()}
    return {kind: found[len(found) // 2] for kind, found in inner.items()}


# --- deriving -----------------------------------------------------------------------------------------------------------


class OtherProgramError(MeasurementError):
    """Two shapes run different operators."""


class _Derived:
    """Polynomials of one pass, from its anatomies at several shapes; what follows none is bounded, and named."""

    def __init__(
        self, seen: dict[Shape, Anatomy], shapes: Sequence[Shape], held_out: Sequence[Shape], products: Sequence[str]
    ) -> None:
        self._seen, self._shapes, self._held_out = seen, list(shapes), list(held_out)
        self._fit = Fit(shapes, products)
        self._bounded: list[str] = []
        self._multiple = 1

    def whole(self, traced: dict[str, int]) -> ProfiledPass:
        """The pass, and what of it is not exact."""
        found = self._whole(traced)
        return replace(found, seq_multiple=self._multiple, remarks=tuple(self._remarks()))

    def _remarks(self) -> Iterator[str]:
        if self._bounded:
            others = f" (and {len(self._bounded) - 1} more)" if self._bounded[1:] else ""
            most = max(shape.length for shape in (*self._shapes, *self._held_out))
            yield (
                f"{self._bounded[0]}{others}: follows no polynomial in the batch and is counted as the most bytes per token that "
                f"were seen, with sequences up to {most:,}"
            )

    def _whole(self, traced: dict[str, int]) -> ProfiledPass:
        every = [*self._shapes, *self._held_out]
        return ProfiledPass(
            blocks={kind: self._block(kind, [self._seen[shape].blocks[at] for shape in every]) for kind, at in traced.items()},
            shared=self._parts("shared", [self._seen[shape].shared for shape in every]),
            beside=self._parts("beside the blocks", [self._seen[shape].beside for shape in every]),
            first_input=self._amount("first input", [self._seen[shape].first_input_bytes for shape in every]),
            loss=self._most("loss", [self._seen[shape].loss for shape in every]),
            output=self._amount("output", [self._seen[shape].output_bytes for shape in every]),
            head=self._points("head", [self._seen[shape].head for shape in every]),
            head_handed=self._handed("head", [self._seen[shape].head_handed for shape in every]),
            last=self._most("below the blocks", [self._seen[shape].last for shape in every]),
            last_handed=self._handed("below the blocks", [self._seen[shape].last_handed for shape in every]),
        )

    def _block(self, kind: str, seen: Sequence[BlockAnatomy]) -> ProfiledBlock:
        kept = self._parts(f"{kind}, kept", [one.kept for one in seen])
        forward = self._most(f"{kind}, forward", [one.forward for one in seen])
        held = total(*(part.amount for part in kept))
        return ProfiledBlock(
            input=self._amount(f"{kind}, input", [one.input_bytes for one in seen]),
            kept=kept,
            forward=tuple(less(one, held) for one in forward),
            points=self._points(f"{kind}, backward", [one.backward for one in seen]),
            handed=self._handed(f"{kind}, gradients", [one.handed for one in seen]),
            cast_elements=seen[0].cast_elements,
        )

    def _parts(self, what: str, seen: Sequence[Sequence[Piece]]) -> tuple[Part, ...]:
        self._same_program(what, [[piece.reason for piece in pieces] for pieces in seen])
        columns = zip(*seen, strict=True)
        return tuple(
            Part(
                reason=column[0].reason, amount=self._amount(f"{what}: {column[0].reason}", [piece.n_bytes for piece in column])
            )
            for column in columns
        )

    def _most(self, what: str, seen: Sequence[Sequence[int]]) -> tuple[Amount, ...]:
        """Those of many sums of which none other is always larger."""
        self._same_program(what, [len(one) for one in seen])
        amounts = [self._amount(f"{what}, request {at}", column) for at, column in enumerate(zip(*seen, strict=True))]
        return tuple(_undominated(list(dict.fromkeys(amounts)), covers)) or (Amount(),)

    def _points(self, what: str, seen: Sequence[Sequence[Instant]]) -> tuple[Point, ...]:
        self._same_program(what, [[one.name for one in instants] for instants in seen])
        points = [self._point(what, column) for column in zip(*seen, strict=True)]
        return tuple(_undominated(list(dict.fromkeys(points)), _point_covers))

    def _handed(self, what: str, seen: Sequence[Sequence[HandedOn]]) -> tuple[Handed, ...]:
        self._same_program(what, [[one.name for one in handed] for handed in seen])
        return tuple(
            Handed(
                name=column[0].name,
                saved=self._amount(f"{what}: {column[0].name}, saved", [one.saved for one in column]),
                working=self._amount(f"{what}: {column[0].name}", [one.working for one in column]),
            )
            for column in zip(*seen, strict=True)
        )

    def _point(self, what: str, column: Sequence[Instant]) -> Point:
        first = column[0]
        return Point(
            name=first.name,
            saved=self._amount(f"{what}: {first.name}, saved", [one.saved for one in column]),
            working=self._amount(f"{what}: {first.name}", [one.working for one in column]),
            gradients=first.gradients,
            current=first.current,
            casts=first.casts,
            flash=None
            if first.flash is None
            else Flash(heads=first.flash[0], head_dim=first.flash[1], kv_heads=first.flash[2]),
        )

    def _same_program(self, what: str, seen: Sequence[object]) -> None:
        shapes = [*self._shapes, *self._held_out]
        for shape, one in zip(shapes, seen, strict=True):
            if one != seen[0]:
                raise OtherProgramError(
                    f"{what}: {shape.sequences} x {shape.length} tokens run other operators than {shapes[0].sequences} x "
                    f"{shapes[0].length}; no polynomial can tell of both, so profile the longer ones alone (--seq-len)"
                )

    def _amount(self, what: str, counted: Sequence[int]) -> Amount:
        """The polynomial through the counts, held against those at the shapes held out."""
        solved_at = len(self._shapes)
        found = self._fit.amount(counted[:solved_at])
        if found is None:
            return self._bound(what, counted)
        others = dict(zip(self._held_out, counted[solved_at:], strict=True))
        if all(value(found, shape) == n_bytes for shape, n_bytes in others.items()):
            return found
        filled = padded(found, others, MULTIPLES if self._multiple == 1 else (self._multiple,))
        if filled is None:
            return self._bound(what, counted)
        found, self._multiple = filled
        return found

    def _bound(self, what: str, counted: Sequence[int]) -> Amount:
        """So many bytes per token that none of the counts is above, where no polynomial goes through them."""
        tokens = [shape.sequences * max(1, shape.length) for shape in (*self._shapes, *self._held_out)]
        per_token = max(-(-n_bytes // count) for n_bytes, count in zip(counted, tokens, strict=True))
        self._bounded.append(what)
        return Amount(tokens=per_token) if self._shapes[0].length else Amount(micro_batch=per_token)


T = TypeVar("T")


def _undominated(found: list[T], covering: Callable[[T, T], bool]) -> Iterator[T]:
    """Those that no other covers, whatever the batch; the later of equals."""
    kept = list(found)
    for one in found:
        if any(other is not one and covering(other, one) for other in kept):
            kept.remove(one)
    yield from kept


def _point_covers(first: Point, second: Point) -> bool:
    counts = (first.gradients, first.current, first.casts), (second.gradients, second.current, second.casts)
    if any(a < b for a, b in zip(*counts, strict=True)) or (second.flash is not None and first.flash != second.flash):
        return False
    return covers(total(first.saved, first.working), total(second.saved, second.working))
