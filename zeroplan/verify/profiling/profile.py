"""Derives a module's profile: its passes taken apart at a few shapes, and exact polynomials through what was counted.

One block of each kind stands for all of its kind, for several sequences and, since some modules treat it otherwise, for one.
What follows no polynomial is said by name.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.errors import ZeroplanError
from zeroplan.spec.profile import (
    Modules,
    Profile,
    ProfiledPass,
    Tensor,
    Variant,
)
from zeroplan.spec.recipe import Engine, Precision, Recompute
from zeroplan.verify.environment import environment
from zeroplan.verify.pretended.fake_tensors import fake_tensors
from zeroplan.verify.profiling.anatomy import Anatomy, BlockAnatomy, Manner
from zeroplan.verify.profiling.cutting import anatomy
from zeroplan.verify.profiling.derived import Derived, OtherProgramError
from zeroplan.verify.profiling.polynomials import (
    OF_MORE,
    OF_NOTHING,
    OF_ONE,
    OF_SEQUENCES,
    Shape,
)
from zeroplan.verify.profiling.structure import Structure, structure_of
from zeroplan.verify.profiling.subject import Subject
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


def _modules(seen: Anatomy, whole: "Structure") -> Modules:
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

    def structure(self, manner: Manner) -> Structure:
        """Look at the whole module and trace it once, to see which blocks are alike."""
        return structure_of(self._subject.whole, self._subject.layer_kinds, lambda: self._probe(manner))

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

    def variant(self, manner: Manner, whole: Structure) -> Variant:
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

    def _pass(self, manner: Manner, whole: Structure, *, several: bool) -> ProfiledPass:
        shapes, held_out, products = self._shapes(several=several)
        seen = {shape: self._anatomy(manner, shape) for shape in (*shapes, *held_out)}
        self.first.setdefault(manner, seen[shapes[0]])
        found = self._derived(seen, shapes, held_out, products, whole)
        return replace(found, remarks=(*found.remarks, *_unlike(seen[shapes[-1]], whole)))

    def _derived(
        self, seen: dict[Shape, Anatomy], shapes: list[Shape], held_out: list[Shape], products: tuple[str, ...], whole: Structure
    ) -> ProfiledPass:  # fmt: skip
        """Polynomials for every length or, where odd ones run other operators, for multiples of the unit."""
        try:
            return Derived(seen, shapes, held_out, products).whole(whole.traced)
        except OtherProgramError:
            even = [shape for shape in held_out if not shape.length % self._unit]
            if even == held_out:
                raise
            found = Derived(seen, shapes, even, products).whole(whole.traced)
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


def _unlike(seen: Anatomy, whole: Structure) -> Iterator[str]:
    """Blocks of one kind must keep and peak alike."""
    for at, block in enumerate(seen.blocks):
        kind = whole.kinds[at]
        like = seen.blocks[whole.traced[kind]]
        if block.kept_bytes != like.kept_bytes or _peak(block) > _peak(like):
            yield f"block {at + 1} takes more, or keeps another number of bytes, than the {kind} that stands for it"


def _peak(block: BlockAnatomy) -> int:
    return max(one.saved + one.working for one in block.backward)
