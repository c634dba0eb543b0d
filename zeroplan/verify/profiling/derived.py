"""Fits polynomials to the parts of one pass at several shapes; a part without a fit gets an upper bound and a remark."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from zeroplan.errors import MeasurementError
from zeroplan.spec.profile import Amount, Flash, GradientArrival, Multiplied, Part, Point, ProfiledBlock, ProfiledPass
from zeroplan.verify.profiling.anatomy import Anatomy, BlockAnatomy, GradientReady, Instant, Operations, Piece
from zeroplan.verify.profiling.polynomials import MULTIPLES, Fit, Shape, covers, less, padded, total, value


class OtherProgramError(MeasurementError):
    """Two shapes run different operators."""


class Derived:
    """The polynomials of one pass."""

    def __init__(
        self, seen: dict[Shape, Anatomy], shapes: Sequence[Shape], held_out: Sequence[Shape], products: Sequence[str]
    ) -> None:
        self._seen, self._shapes, self._held_out = seen, list(shapes), list(held_out)
        self._fit = Fit(shapes, products)
        self._bounded: list[str] = []
        self._multiple = 1

    def whole(self, traced: dict[str, int]) -> ProfiledPass:
        """The profile of the pass, with remarks on inexact parts."""
        found = self._whole(traced)
        return replace(found, seq_multiple=self._multiple, remarks=tuple(self._remarks()))

    def _remarks(self) -> Iterator[str]:
        if self._bounded:
            others = f" (and {len(self._bounded) - 1} more)" if self._bounded[1:] else ""
            most = max(shape.length for shape in (*self._shapes, *self._held_out))
            yield (
                f"{self._bounded[0]}{others}: no polynomial in the batch fits, so it counts as the most bytes per token that were "
                f"measured, with sequences up to {most:,}"
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
            operations=self._operations([self._seen[shape].operations for shape in every]),
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
            operations=self._operations([one.operations for one in seen]),
        )

    def _operations(self, seen: Sequence[Operations]) -> Multiplied | None:
        """Polynomials that give every counted operation; None if there are none."""
        matrices, attention = self._exact([one.matrices for one in seen]), self._exact([one.attention for one in seen])
        return None if matrices is None or attention is None else Multiplied(matrices=matrices, attention=attention)

    def _exact(self, counted: Sequence[int]) -> Amount | None:
        found, others = self._fit.amount(counted[: len(self._shapes)]), counted[len(self._shapes) :]
        if found is None or any(value(found, shape) != n for shape, n in zip(self._held_out, others, strict=True)):
            return None
        return found

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
        """The amounts that can be the largest for some batch."""
        self._same_program(what, [len(one) for one in seen])
        amounts = [self._amount(f"{what}, request {at}", column) for at, column in enumerate(zip(*seen, strict=True))]
        return tuple(_undominated(list(dict.fromkeys(amounts)), covers)) or (Amount(),)

    def _points(self, what: str, seen: Sequence[Sequence[Instant]]) -> tuple[Point, ...]:
        self._same_program(what, [[one.name for one in instants] for instants in seen])
        points = [self._point(what, column) for column in zip(*seen, strict=True)]
        return tuple(_undominated(list(dict.fromkeys(points)), _point_covers))

    def _handed(self, what: str, seen: Sequence[Sequence[GradientReady]]) -> tuple[GradientArrival, ...]:
        self._same_program(what, [[one.name for one in arrival] for arrival in seen])
        return tuple(
            GradientArrival(
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
            flash=self._flash(column),
        )

    def _flash(self, column: Sequence[Instant]) -> Flash | None:
        """A running flash kernel. Its queries are a sequence's tokens, or of one number; else the most that a trace had."""
        shapes = (*self._shapes, *self._held_out)
        seen = [(one.flash, shape.length) for one, shape in zip(column, shapes, strict=True) if one.flash is not None]
        if not seen:
            return None
        (heads, head_dim, kv_heads, most), _ = max(seen, key=lambda one: one[0][-1])
        of_tokens = all(flash[-1] == length for flash, length in seen)
        return Flash(heads=heads, head_dim=head_dim, kv_heads=kv_heads, queries=0 if of_tokens else most)

    def _same_program(self, what: str, seen: Sequence[object]) -> None:
        shapes = [*self._shapes, *self._held_out]
        for shape, one in zip(shapes, seen, strict=True):
            if one != seen[0]:
                raise OtherProgramError(
                    f"{what}: {shape.sequences} x {shape.length} tokens run other operators than {shapes[0].sequences} x "
                    f"{shapes[0].length}, so no polynomial fits both"
                )

    def _amount(self, what: str, counted: Sequence[int]) -> Amount:
        """The polynomial through the counts, checked at the held-out shapes."""
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
        """An upper bound where no polynomial fits: bytes per token that no count exceeds."""
        tokens = [shape.sequences * max(1, shape.length) for shape in (*self._shapes, *self._held_out)]
        per_token = max(-(-n_bytes // count) for n_bytes, count in zip(counted, tokens, strict=True))
        self._bounded.append(what)
        return Amount(tokens=per_token) if self._shapes[0].length else Amount(micro_batch=per_token)


T = TypeVar("T")


def _undominated(found: list[T], covering: Callable[[T, T], bool]) -> Iterator[T]:
    """The items without those that another one covers for every batch; of equal items, the later one."""
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
