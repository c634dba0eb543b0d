"""Draws random profiles, with every part of a traced module's profile, like the one in :mod:`tests.profiles`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from zeroplan.spec.profile import (
    Amount,
    Flash,
    GradientArrival,
    Modules,
    Multiplied,
    Part,
    Point,
    Profile,
    ProfiledBlock,
    ProfiledPass,
    Run,
    Tensor,
    Variant,
)

_MANNERS = ((2, False), (2, True), (4, False))
_PER = ("constant", "micro_batch", "seq_len", "tokens", "seq_len_squared", "tokens_seq_len", "padding")


def profile(draw: Random) -> Profile:
    """A profile of one or two kinds of blocks between an embedding and a head, in every manner of execution."""
    kinds = {kind: _weights(draw) for kind in ("Odd", "Even")[: draw.randint(1, 2)]}
    tied = draw.choice((False, False, True))
    table = (_tensor(draw, "table.weight"),)
    width = draw.randint(1, 999)
    tail = (*(() if tied else (_tensor(draw, "head.weight"),)), Tensor(name="norm.weight", shape=(width,), frozen=width > 900))
    passes = [
        Variant(element_bytes=width, autocast=autocast, kernels=kernels, recompute=recompute,
                one=one, more=one if draw.randint(0, 1) else _pass(draw, kinds, table, tail, counted_by=one.counted_by))
        for kernels in draw.choice((("cuda",), ("cpu", "cuda")))
        for width, autocast in _MANNERS
        for recompute in ("none", "selective", "full")
        for one in (_pass(draw, kinds, table, tail, counted_by=draw.choice((1, 1, 1, 64))),)
    ]  # fmt: skip
    length = draw.choice((None, None, 512))
    apart = Random(str(table))  # noqa: S311  so that other draws stay as they are
    return Profile(
        name=draw.choice(("by hand", "drawn")),
        source=draw.choice(("nothing", "no module")),
        packages=draw.choice(({}, {"torch": "2.13.0"})),
        attention=draw.choice(("sdpa", "sdpa", "eager")),
        embeddings=table,
        runs=tuple(Run(kind=kind, layers=draw.randint(1, 20)) for kind in (*kinds, *kinds)),
        kinds=kinds,
        tail=tail,
        order=draw.choice((("table.weight", ""), ("", "table.weight"))) + tuple(each.name for each in tail),
        modules=Modules(
            holding=draw.choice((("",), ("", "body"))),
            before=draw.choice((("table",), ("table", "drop"))),
            after=draw.choice((("norm", "head"), ("norm", "head", "loss"))),
            kinds={kind: tuple(each.name.rpartition(".")[0] for each in weights) for kind, weights in kinds.items()},
            unfollowed=draw.choice(((), ("drop",))),
            unnoticed=draw.choice((("table",), ())),
            tied="head" if tied else None,
        ),
        tied_head="table.weight" if tied else None,
        buffer_bytes=draw.choice((0, draw.randint(1, 10**6))),
        attribute_bytes=apart.choice((0, 999)),
        inputs=apart.choice((0, 4096)),
        seq_len=length,
        shortest=1 if length else draw.choice((1, 16)),
        longest=None if length else draw.choice((None, 2**17)),
        variants=tuple(passes),
    )


def _tensor(draw: Random, name: str) -> Tensor:
    return Tensor(name=name, shape=(draw.randint(1, 2000), draw.randint(1, 2000)), autocast=draw.choice((True, False)))


def _weights(draw: Random) -> tuple[Tensor, ...]:
    return tuple(_tensor(draw, f"{name}.weight") for name in ("mix", "norm", "out")[: draw.randint(1, 3)])


def _amount(draw: Random, *, most: int = 4000) -> Amount:
    """A polynomial with a term per token, and at times the other terms."""
    tokens = draw.randint(1, most)  # padding adds whole tokens, so it is at most this
    others = {name: draw.randint(0, min(64, tokens)) for name in _PER if name != "tokens" and draw.randint(0, 5) == 5}
    return Amount(tokens=tokens, **others)


def _pass(
    draw: Random, kinds: dict[str, tuple[Tensor, ...]], table: Sequence[Tensor], tail: Sequence[Tensor], *, counted_by: int
) -> ProfiledPass:  # fmt: skip
    one = ProfiledPass(
        seq_multiple=draw.choice((1, 32, 128)),
        counted_by=counted_by,
        remarks=draw.choice(((), ("its scan is not counted",))),
        blocks={kind: _block(draw, weights) for kind, weights in kinds.items()},
        shared=_parts(draw, "ids"),
        beside=_parts(draw, "mask"),
        first_input=draw.choice((Amount(), _amount(draw))),
        loss=_several(draw),
        output=_amount(draw),
        head=_points(draw),
        head_handed=_handed(draw, tail),
        last=_several(draw),
        last_handed=_handed(draw, table),
        operations=_operations(draw),
    )
    flows = one.blocks[next(iter(kinds))].input  # it leaves the first block's backward, so it stays alive after that
    return replace(one, last=tuple(_sum(flows, each) for each in one.last))


def _sum(first: Amount, second: Amount) -> Amount:
    return Amount(**{name: getattr(first, name) + getattr(second, name) for name in _PER})


def _block(draw: Random, weights: Sequence[Tensor]) -> ProfiledBlock:
    return ProfiledBlock(
        input=_amount(draw),
        kept=_parts(draw, "norm: rms", "attention: softmax"),
        forward=_several(draw),
        points=_points(draw),
        handed=_handed(draw, weights),
        cast_elements=draw.choice((0, draw.randint(1, 10**6))),
        operations=_operations(draw),
    )


def _operations(draw: Random) -> Multiplied | None:
    return draw.choice((None, Multiplied(matrices=_amount(draw), attention=draw.choice((Amount(), _amount(draw))))))


def _several(draw: Random) -> tuple[Amount, ...]:
    return tuple(_amount(draw) for _ in range(draw.randint(1, 2)))


def _parts(draw: Random, *reasons: str) -> tuple[Part, ...]:
    return tuple(Part(reason=reason, amount=_amount(draw)) for reason in reasons[: draw.randint(0, len(reasons))])


def _points(draw: Random) -> tuple[Point, ...]:
    return tuple(_point(draw, name) for name in ("mlp: mm", "attention")[: draw.randint(1, 2)])


def _point(draw: Random, name: str) -> Point:
    one = Point(
        name=name,
        saved=_amount(draw),
        working=_amount(draw),
        gradients=draw.choice((0, draw.randint(1, 10**6))),
    )
    return replace(
        one,
        current=min(one.gradients, draw.choice((0, draw.randint(1, 10**5)))),  # one of those that are made
        casts=draw.choice((0, draw.randint(1, 10**5))),
        flash=draw.choice((None, _flash(draw))),
    )


def _flash(draw: Random) -> Flash:
    made = Flash(heads=4 * draw.randint(1, 4), head_dim=16 * draw.randint(1, 8), kv_heads=draw.choice((2, 4)))
    return replace(
        made, queries=640 if made.heads == 16 and made.kv_heads == 2 else 0
    )  # makes no draw: others stay as they are


def _handed(draw: Random, tensors: Sequence[Tensor]) -> tuple[GradientArrival, ...]:
    return tuple(
        GradientArrival(name=each.name, saved=_amount(draw), working=_amount(draw)) for each in tensors if not each.frozen
    )
