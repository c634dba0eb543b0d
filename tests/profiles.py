"""A small hand-written profile, for tests without torch."""

from zeroplan.spec.profile import (
    Amount,
    Flash,
    GradientArrival,
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


def handed(*names: str, width: int) -> tuple[GradientArrival, ...]:
    saved, working = Amount(tokens=4 * width), Amount(tokens=2 * width)
    return tuple(GradientArrival(name=name, saved=saved, working=working) for name in names)


def block(width: int, *names: str) -> ProfiledBlock:
    return ProfiledBlock(
        input=Amount(tokens=2 * width),
        kept=(
            Part(reason="norm: rms", amount=Amount(tokens=6 * width)),
            Part(reason="attention: softmax", amount=Amount(tokens_seq_len=8, padding=4)),
        ),
        forward=(Amount(tokens=4 * width), Amount(tokens_seq_len=2, constant=12)),
        points=(
            Point(name="mlp: mm", saved=Amount(tokens=9 * width), working=Amount(tokens=3 * width), gradients=width * width),
            Point(name="attention", saved=Amount(tokens=4 * width), working=Amount(tokens_seq_len=16, seq_len_squared=2),
                  gradients=3 * width * width, flash=Flash(heads=4, head_dim=16, kv_heads=2)),
        ),
        handed=handed(*names, width=width),
    )  # fmt: skip


def traced(width: int = 64) -> ProfiledPass:
    return ProfiledPass(
        seq_multiple=32,
        blocks={"Odd": block(width, "mix.weight", "norm.weight"), "Even": block(2 * width, "mix.weight")},
        shared=(Part(reason="ids", amount=Amount(tokens=8)),),
        beside=(Part(reason="mask", amount=Amount(seq_len_squared=1)),),
        first_input=Amount(),
        loss=(Amount(tokens=1200, micro_batch=8),),
        output=Amount(tokens=200),
        head=(Point(name="loss", saved=Amount(tokens=400), working=Amount(tokens=800)),),
        head_handed=handed("head.weight", width=width),
        last=(Amount(tokens=2 * width, constant=64),),
        last_handed=handed("table.weight", width=width),
    )


def by_hand() -> Profile:
    """A profile of two alternating kinds of blocks, in 16 bits on CUDA, with and without recomputation."""
    kinds = {
        "Odd": (Tensor(name="mix.weight", shape=(64, 192)), Tensor(name="norm.weight", shape=(64,))),
        "Even": (Tensor(name="mix.weight", shape=(128, 192)),),
    }
    variants = tuple(
        Variant(element_bytes=2, autocast=False, kernels="cuda", recompute=recompute, one=traced(), more=traced())
        for recompute in ("none", "selective", "full")
    )
    return Profile(
        name="by hand",
        source="nothing",
        packages={},
        embeddings=(Tensor(name="table.weight", shape=(100, 64)),),
        runs=(Run(kind="Odd", layers=2), Run(kind="Even", layers=1), Run(kind="Odd", layers=2)),
        kinds=kinds,
        tail=(Tensor(name="head.weight", shape=(100, 64)),),
        order=("table.weight", "", "head.weight"),
        modules=Modules(
            holding=("",),
            before=("table",),
            after=("head",),
            kinds={"Odd": ("mix", "norm"), "Even": ("mix",)},
            unnoticed=("table",),
        ),
        buffer_bytes=96,
        variants=variants,
    )
