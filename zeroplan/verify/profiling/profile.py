"""Derives a module's profile: traces its passes at a few shapes and fits exact polynomials to the counted bytes.

One block of each kind represents its kind, once for several sequences and once for one, since some modules treat one differently.
Remarks name what no polynomial fits.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from zeroplan.errors import ZeroplanError
from zeroplan.spec.profile import Modules, Profile, ProfiledPass, Tensor, Variant
from zeroplan.spec.recipe import Engine, Precision, Recompute
from zeroplan.verify.environment import environment
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
from zeroplan.verify.profiling.anatomy import Anatomy, BlockAnatomy, Manner
from zeroplan.verify.profiling.cutting import anatomy
from zeroplan.verify.profiling.derived import Derived, OtherProgramError
from zeroplan.verify.profiling.lengths import Shapes, lengths, limits
from zeroplan.verify.profiling.polynomials import Shape
from zeroplan.verify.profiling.structure import Structure, structure_of
from zeroplan.verify.profiling.subject import Subject
from zeroplan.verify.watching.cycles import manual_garbage_collection
from zeroplan.verify.watching.tracker import Tracker


class Wanted(NamedTuple):
    """The engines, precisions and kinds of recomputation to profile."""

    engines: tuple[Engine, ...] = ("fsdp2", "ddp")
    precisions: tuple[Precision, ...] = ("bf16-mixed", "bf16", "fp32")
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    shortest: int | None = None
    """Profile sequences of this length and longer; if every length runs other operators, of this length alone. [tokens]"""
    fallback: int | None = None
    """The ``shortest`` to use if short sequences run other operators than long ones. [tokens]"""


def manners(wanted: Wanted) -> tuple[Manner, ...]:
    """The ways the module is executed under the wanted settings, on the fake GPU."""
    found: list[Manner] = []
    for recompute in wanted.recompute:
        for engine in wanted.engines:
            for precision in wanted.precisions:
                autocast = engine == "ddp" and precision.endswith("mixed")
                manner = Manner(4 if precision == "fp32" else 2, autocast=autocast, kernels="cuda", recompute=recompute)
                found.append(manner._replace(casts_inputs=engine == "fsdp2" and precision.endswith("mixed")))
    return tuple(one for one in dict.fromkeys(found) if one.casts_inputs or one._replace(casts_inputs=True) not in found)


def profile(subject: Subject, wanted: Wanted, *, say: Callable[[str], None]) -> Profile:
    """Trace a module and derive its profile; ``say`` receives the progress.

    Raises :class:`~zeroplan.errors.MeasurementError` if one block of each kind cannot represent the others.
    """
    with manual_garbage_collection():  # one block for all passes, which collect themselves
        try:
            return _profile(subject, wanted, say)
        except OtherProgramError:
            if wanted.fallback is None:
                raise
            return _profile(subject, wanted._replace(shortest=wanted.fallback), say)


def _profile(subject: Subject, wanted: Wanted, say: Callable[[str], None]) -> Profile:
    tracer = _Tracer(subject, say, wanted.shortest)
    every = manners(wanted)
    whole = tracer.structure(every[0])
    variants = _variants(tracer, every, whole, wanted.shortest)
    cast = frozenset(name for one in tracer.first.values() for name in one.cast)
    tail = next(iter(tracer.first.values())).tail
    kinds, runs = whole.runs()
    return Profile(
        name=subject.name,
        source=subject.source,
        packages={
            **{name: environment().packages[name] for name in ("torch", "transformers") if name in environment().packages},
            **subject.packages,
        },
        attention=subject.attention,
        embeddings=tuple(_tensor(name, one, cast, whole.frozen) for name, one in whole.outside if name not in tail),
        runs=runs,
        kinds={
            kind: tuple(
                _tensor(name, one, _as_whole(cast, whole, kind), whole.frozen, whole.names[at])
                for name, one in whole.inside(at)
            )
            for kind, at in kinds.items()
        },
        tail=tuple(_tensor(name, one, cast, whole.frozen) for name, one in whole.outside if name in tail),
        order=whole.order,
        modules=_modules(next(iter(tracer.first.values())), whole),
        tied_head=whole.tied,
        buffer_bytes=whole.buffer_bytes,
        attribute_bytes=whole.attribute_bytes,
        inputs=subject.inputs,
        seq_len=tracer.fixed_length,
        longest=subject.longest if tracer.fixed_length is None else None,
        shortest=1 if tracer.fixed_length is not None else tracer.shortest,
        variants=variants,
    )


def _variants(tracer: "_Tracer", every: tuple[Manner, ...], whole: Structure, shortest: int | None) -> tuple[Variant, ...]:
    """The profile in every manner: of all lengths or, if each length runs other operators, of the shortest alone."""
    try:
        return tuple(tracer.variant(manner, whole) for manner in every)
    except OtherProgramError as error:
        if shortest is None:
            raise OtherProgramError(
                f"{error}; use --seq-len TOKENS for sequences of that length and longer, or of that length alone "
                "where each length runs other operators"
            ) from None
        tracer.keep_to(shortest, str(error))
    return tuple(tracer.variant(manner, whole) for manner in every)


def _modules(seen: Anatomy, whole: "Structure") -> Modules:
    inside = [one for one in seen.called if f"{one.name}.".startswith(whole.traced_names)]
    outside = [one for one in seen.called if one not in inside]
    before = [one for one in outside if not one.holds_blocks and not one.after_blocks]
    return Modules(
        holding=tuple(one.name for one in outside if one.holds_blocks),
        before=tuple(one.name for one in before),
        after=tuple(one.name for one in outside if one.after_blocks),
        kinds={
            kind: tuple(
                one.name.removeprefix(whole.traced_names[at]) for one in inside if one.name.startswith(whole.traced_names[at])
            )
            for kind, at in whole.traced.items()
        },
        unfollowed=tuple(one.name for one in before if not one.follows),
        unnoticed=tuple(one.name for one in before if not one.noticed),
        tied=next((one.name for one in outside if one.after_blocks and one.shares), None),
    )


def _as_whole(cast: frozenset[str], whole: Structure, kind: str) -> frozenset[str]:
    """The parameters that autocast copies in the traced block of a kind, under their names in the whole module."""
    traced, at = whole.traced_names[whole.traced[kind]], whole.kinds.index(kind)
    return frozenset(whole.names[at] + name.removeprefix(traced) for name in cast if name.startswith(traced))


def _tensor(name: str, shape: tuple[int, ...], cast: frozenset[str], frozen: frozenset[str], prefix: str = "") -> Tensor:
    return Tensor(name=name.removeprefix(prefix), shape=shape or (1,), autocast=name in cast, frozen=name in frozen)


class _Tracer:
    """Traces a subject's passes, once per manner and shape."""

    def __init__(self, subject: Subject, say: Callable[[str], None], shortest: int | None) -> None:
        self._subject, self._say, self._shortest = subject, say, shortest
        self.fixed_length: int | None = None
        self.first: dict[Manner, Anatomy] = {}
        self._lengths = lengths(subject.longest, shortest)._replace(only=subject.only)
        self._traced: dict[tuple[Manner, Shape], Anatomy] = {}

    @property
    def shortest(self) -> int:
        """The shortest sequences that the profile covers. [tokens]"""
        return max(1, self._lengths.least)

    def structure(self, manner: Manner) -> Structure:
        """The structure of the whole module, from one trace that shows which blocks are alike."""
        shorten = None if self._subject.shorten is None else self._shorten
        return structure_of(
            self._subject.whole,
            self._subject.layer_kinds,
            lambda: self._probe(manner),
            self._say,
            shorten=shorten,
            places=self._subject.places,
        )

    def _shorten(self, layers: int) -> None:
        """Trace fewer blocks from now on, and drop earlier traces of all of them."""
        if self._subject.shorten is not None:
            self._subject.shorten(layers)
            self._traced.clear()

    def keep_to(self, length: int, why: str) -> None:
        """Trace sequences of one length from now on."""
        self._say(f"{why}; the profile covers {length:,} tokens alone")
        self._lengths, self.fixed_length = self._lengths._replace(only=length), length
        self.first.clear()

    def _probe(self, manner: Manner) -> Anatomy:
        """One trace at a chosen length or, if the module accepts only its own batch, at that length."""
        try:
            if self._subject.longest is None:
                self._find_longest(manner)
            found = self._anatomy(manner, self._lengths.probed)
        except ZeroplanError:
            raise
        except Exception:  # a user's module may raise anything at a length it does not support
            if not self._subject.has_batch:
                raise
            self._lengths = self._lengths._replace(only=0)
            found = self._anatomy(manner, self._lengths.probed)
        if self._lengths.only is not None:
            self.fixed_length = self._lengths.only or self._own_length()
        return found

    def _find_longest(self, manner: Manner) -> None:
        """Find how long sequences the module accepts; raise its error at the shortest length tried."""
        tried = limits(self._lengths)
        for limit in tried:
            shape = Shape(1, limit)
            try:
                self._traced[manner, shape] = self._anatomy(manner, shape)
            except ZeroplanError:
                raise
            except Exception:
                if limit == tried[-1]:
                    raise
            else:
                self._lengths = lengths(limit, self._shortest)
                return

    def _own_length(self) -> int:
        with fake_tensors(Tracker(), "cpu") if self._subject.taken_apart is None else nullcontext():
            sizes = [tensor.shape for tensor in self._subject.whole().batch.values()]
        return next((int(size[1]) for size in sizes if len(size) > 1), 1)

    def _anatomy(self, manner: Manner, shape: Shape) -> Anatomy:
        known = self._traced.pop((manner, shape), None)
        if known is not None:
            return known
        apart = self._subject.taken_apart
        return anatomy(lambda: self._subject.make(shape), manner) if apart is None else apart(shape, manner)

    def variant(self, manner: Manner, whole: Structure) -> Variant:
        """The profile in one manner of execution."""
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
        traced = self._lengths.shapes(several=several)
        seen = {shape: self._anatomy(manner, shape) for shape in (*traced.solved, *traced.held_out)}
        self.first.setdefault(manner, seen[traced.solved[0]])
        found = self._derived(seen, traced, whole)
        return replace(found, remarks=(*found.remarks, *_unlike(seen[traced.solved[-1]], whole)))

    def _derived(self, seen: dict[Shape, Anatomy], traced: Shapes, whole: Structure) -> ProfiledPass:
        """Polynomials for every length or, if odd lengths run other operators, for multiples of the unit."""
        unit = self._lengths.unit
        try:
            return Derived(seen, *traced).whole(whole.traced)
        except OtherProgramError:
            even = [shape for shape in traced.held_out if not shape.length % unit]
            if even == traced.held_out or self._lengths.only is not None:
                raise
            found = Derived(seen, *traced._replace(held_out=even)).whole(whole.traced)
        other = f"lengths that are no multiples of {unit} may run other operators, and count as the next multiple"
        return replace(found, counted_by=unit, remarks=(*found.remarks, other))


def _unlike(seen: Anatomy, whole: Structure) -> Iterator[str]:
    """A remark for each block that keeps or needs more than the block that represents its kind."""
    for at, block in enumerate(seen.blocks):
        kind = whole.traced_kinds[at]
        like = seen.blocks[whole.traced[kind]]
        if block.kept_bytes != like.kept_bytes or _peak(block) > _peak(like):
            yield f"block {at + 1} needs more, or keeps another number of bytes, than the {kind} block that represents it"


def _peak(block: BlockAnatomy) -> int:
    return max(one.saved + one.working for one in block.backward)
