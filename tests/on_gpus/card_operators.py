"""Measures the operators of a training step on the card at hand: ``python -m tests.on_gpus.card_operators FILE``.

Writes CSV rows: operator, shape, microseconds, operations and the fewest bytes that the operator must move. Each time is the
median of several runs between two CUDA events. Before each run a large buffer is overwritten, so that no input is in the cache.
The rows ``sustained product`` have no such pause: they show a product's rate once the card runs at its power limit.
"""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUNS = 9
_FLUSHED = 1 << 28
HALF, SINGLE = 2, 4
TOKENS = (2048, 8192)
#: Rows and columns of weights of Llama 3.2 1B, 3.1 8B and 70B, whole and on a tensor-parallel rank.
WEIGHTS = (
    (2048, 2048), (2048, 512), (2048, 8192), (8192, 2048),
    (4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 7168), (7168, 4096),
    (4096, 3584), (3584, 4096), (4096, 1792), (1792, 4096),
    (8192, 8192), (8192, 1024), (8192, 28672), (28672, 8192), (8192, 7168), (7168, 8192), (8192, 3584), (3584, 8192),
    (4096, 128256),
)  # fmt: skip
#: Batch, sequence, heads, heads of keys and values, head size.
ATTENTION = (
    (1, 2048, 32, 8, 64), (4, 2048, 32, 8, 64), (1, 4096, 32, 8, 128), (4, 4096, 32, 8, 128),
    (1, 16384, 32, 8, 128), (1, 32768, 32, 8, 128),
    (1, 8192, 64, 8, 128), (1, 8192, 8, 1, 128), (8, 1024, 25, 25, 64),
)  # fmt: skip
WIDTHS = ((4096, 2048), (4096, 4096), (16384, 4096), (8192, 8192))
"""Tokens and hidden size for memory-bound operators."""
VOCABULARY = 128256


def gradients(out: torch.Tensor, *leaves: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs the backward of an output to its leaves, repeatably and without touching ``grad``."""
    again = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, again, retain_graph=True, allow_unused=True)


class Row(NamedTuple):
    """One measurement."""

    operator: str
    shape: str
    microseconds: float
    operations: int = 0
    least_bytes: int = 0


class Bench:
    """Times functions on a device. On the CPU it uses the clock, only to try out this program."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._buffer = torch.empty(_FLUSHED if device == "cuda" else 1, dtype=torch.uint8, device=device)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
        return (torch.randn(shape, device=self.device, dtype=dtype) * 0.02).requires_grad_(grad)

    def microseconds(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Return the median time of some runs. ``before`` is called ahead of each and is not timed. [µs]"""
        for _ in range(2):
            before()
            run()
        return median(self._once(run, before) for _ in range(RUNS if self.device == "cuda" else 1))

    def _once(self, run: Callable[[], object], before: Callable[[], object]) -> float:
        before()
        self._buffer.zero_()
        if self.device != "cuda":
            began = time.perf_counter()
            run()
            return 1e6 * (time.perf_counter() - began)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end)


def products(bench: Bench) -> Iterator[Row]:
    """Time a linear layer's three products: forward, gradient of the input, gradient of the weight."""
    for tokens in TOKENS:
        for into, out in WEIGHTS:
            x, w, dy = bench.tensor(tokens, into), bench.tensor(out, into), bench.tensor(tokens, out)
            flops, moved = 2 * tokens * into * out, HALF * (tokens * into + into * out + tokens * out)
            for name, run in (
                ("forward", lambda x=x, w=w: x @ w.t()), ("input gradient", lambda dy=dy, w=w: dy @ w),
                ("weight gradient", lambda dy=dy, x=x: dy.t() @ x),
            ):  # fmt: skip
                yield Row(f"product, {name}", f"{tokens}x{into}x{out}", bench.microseconds(run), flops, moved)


def sustained(bench: Bench, seconds: float = 6.0) -> Iterator[Row]:
    """Time a large product repeated without a pause, a row for each half second."""
    size = 8192 if bench.device == "cuda" else 64
    a, b = bench.tensor(size, size), bench.tensor(size, size)
    until = time.perf_counter() + (seconds if bench.device == "cuda" else 0.0)
    while time.perf_counter() < until:
        began, times = time.perf_counter(), 0
        while time.perf_counter() - began < 0.5:
            for _ in range(20):
                a @ b
            torch.cuda.synchronize()
            times += 20
        yield Row(
            "sustained product",
            f"{size}x{size}x{size}",
            1e6 * (time.perf_counter() - began) / times,
            2 * size**3,
            3 * HALF * size * size,
        )


def attention(bench: Bench) -> Iterator[Row]:
    """Time causal scaled_dot_product_attention, forward and backward, with the kernel that torch chooses."""
    for batch, length, heads, kv_heads, width in ATTENTION:
        q = bench.tensor(batch, heads, length, width, grad=True)
        k, v = (bench.tensor(batch, kv_heads, length, width, grad=True) for _ in range(2))
        flops = 2 * batch * heads * length * length * width  # two products, each half masked
        moved = HALF * batch * length * width * (2 * heads + 2 * kv_heads)
        shape = f"{batch}x{length}x{heads}/{kv_heads}x{width}"

        def forward(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, grouped: bool = heads != kv_heads
        ) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        yield Row("attention, forward", shape, bench.microseconds(forward), flops, moved)
        yield Row("attention, backward", shape, bench.microseconds(gradients(forward(), q, k, v)), 5 * flops // 2, 2 * moved)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Normalise as transformers' Llama does: in fp32, then cast back."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def bound_by_memory(bench: Bench) -> Iterator[Row]:
    """Time a block's norms, rope, gated products and sums, forward and backward."""
    for tokens, hidden in WIDTHS:
        leaves = _Leaves.of(bench, tokens, hidden)
        for name, run, tensors in _in_a_block(bench, leaves, tokens, hidden):
            moved, shape = tensors * HALF * tokens * hidden, f"{tokens}x{hidden}"
            yield Row(f"{name}, forward", shape, bench.microseconds(run), 0, moved)
            yield Row(f"{name}, backward", shape, bench.microseconds(gradients(run(), *leaves)), 0, moved)


class _Leaves(NamedTuple):
    """The inputs of a block's operators."""

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    heads: torch.Tensor

    @classmethod
    def of(cls, bench: Bench, tokens: int, hidden: int) -> Self:
        shapes = ((tokens, hidden), (tokens, hidden), (hidden,), (1, hidden // 128, tokens, 128))
        return cls(*(bench.tensor(*shape, grad=True) for shape in shapes))


def _in_a_block(
    bench: Bench, leaves: _Leaves, tokens: int, hidden: int
) -> Iterator[tuple[str, Callable[[], torch.Tensor], int]]:
    """Yield each operator's name, a function that runs it, and the number of tensors of the block's width that it moves."""
    x, y, weight, heads = leaves
    cos, sin = bench.tensor(tokens, 128), bench.tensor(tokens, 128)
    yield "norm, eager", lambda: _rms_norm(x, weight), 2
    yield "norm, fused", lambda: functional.rms_norm(x, (hidden,), weight), 2
    yield "layer norm", lambda: functional.layer_norm(x, (hidden,), weight, weight), 2
    yield "sum", lambda: x + y, 3
    yield "gated product", lambda: functional.silu(x) * y, 3
    yield "gelu", lambda: functional.gelu(x), 2
    yield "rope, eager", lambda: _rotated(heads, cos, sin), 2
    yield "dropout", lambda: functional.dropout(x, 0.1), 2


def ends(bench: Bench) -> Iterator[Row]:
    """Time the embedding, and the loss on fp32 logits."""
    tokens, hidden = TOKENS[0], 4096
    ids = torch.randint(0, VOCABULARY, (tokens,), device=bench.device)
    table = bench.tensor(VOCABULARY, hidden, grad=True)
    yield Row(
        "embedding, forward",
        f"{tokens}x{hidden}",
        bench.microseconds(lambda: functional.embedding(ids, table)),
        0,
        2 * HALF * tokens * hidden,
    )
    backward = gradients(functional.embedding(ids, table), table)
    yield Row("embedding, backward", f"{tokens}x{hidden}", bench.microseconds(backward), 0, HALF * VOCABULARY * hidden)
    logits = bench.tensor(tokens, VOCABULARY, grad=True)
    yield Row(
        "loss, forward",
        f"{tokens}x{VOCABULARY}",
        bench.microseconds(lambda: functional.cross_entropy(logits.float(), ids)),
        0,
        HALF * tokens * VOCABULARY,
    )
    loss = functional.cross_entropy(logits.float(), ids)
    yield Row(
        "loss, backward",
        f"{tokens}x{VOCABULARY}",
        bench.microseconds(gradients(loss, logits)),
        0,
        2 * SINGLE * tokens * VOCABULARY,
    )


def optimizers(bench: Bench) -> Iterator[Row]:
    """Time AdamW on fp32 parameters, with the tensors of a model of a billion parameters."""
    for tensors, size in ((150, 4_000_000), (150, 500_000)):
        for impl in ("fused", "foreach", "forloop"):
            params = [bench.tensor(size, dtype=torch.float32, grad=True) for _ in range(tensors)]
            for param in params:
                param.grad = torch.ones_like(param)
            step = torch.optim.AdamW(params, fused=impl == "fused", foreach=impl == "foreach").step
            yield Row(f"adamw, {impl}", f"{tensors}x{size}", bench.microseconds(step), 0, 7 * SINGLE * tensors * size)


def copies(bench: Bench) -> Iterator[Row]:
    """Time copies and casts on the card, and copies to and from the host."""
    size = 1 << 28
    single = bench.tensor(size, dtype=torch.float32)
    half = single.to(torch.bfloat16)
    other = torch.empty_like(single)
    yield Row("copy", str(size), bench.microseconds(lambda: other.copy_(single)), 0, 2 * SINGLE * size)
    yield Row("cast to bf16", str(size), bench.microseconds(lambda: half.copy_(single)), 0, (SINGLE + HALF) * size)
    yield Row("cast to fp32", str(size), bench.microseconds(lambda: other.copy_(half)), 0, (SINGLE + HALF) * size)
    yield Row("fill", str(size), bench.microseconds(other.zero_), 0, SINGLE * size)
    if bench.device == "cuda":
        pinned = torch.empty(size // 4, dtype=torch.float32, pin_memory=True)
        part = single[: size // 4]
        yield Row(
            "to the host",
            str(size // 4),
            bench.microseconds(lambda: pinned.copy_(part, non_blocking=True)),
            0,
            SINGLE * size // 4,
        )
        yield Row(
            "from the host",
            str(size // 4),
            bench.microseconds(lambda: part.copy_(pinned, non_blocking=True)),
            0,
            SINGLE * size // 4,
        )


def launches(bench: Bench) -> Iterator[Row]:
    """Time the CPU's launch of one operator: many small ones in a row, without and with autograd."""
    small, many = bench.tensor(16), 2000
    tracked = bench.tensor(16, grad=True)
    matrix, layer = bench.tensor(8, 64), torch.nn.Linear(64, 64, bias=False, device=bench.device, dtype=torch.bfloat16)
    for name, run in (
        ("sum", lambda: small + small),
        ("sum, tracked", lambda: tracked + small),
        ("linear, tracked", lambda: layer(matrix)),
    ):
        run()
        if bench.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(many):
            run()
        if bench.device == "cuda":
            torch.cuda.synchronize()
        yield Row(f"launch, {name}", str(many), 1e6 * (time.perf_counter() - began) / many)


GROUPS = (launches, copies, products, attention, bound_by_memory, ends, optimizers, sustained)


def main(path: Path, device: str = "cuda") -> int:
    """Measure all groups. A group that fails is reported and left out."""
    torch.manual_seed(0)
    bench = Bench(device)
    worst = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("gpu", "torch", *Row._fields))
        name = torch.cuda.get_device_name() if device == "cuda" else device
        for group in GROUPS:
            try:
                for row in group(bench):
                    table.writerow((name, torch.__version__, *row._replace(microseconds=round(row.microseconds, 2))))
            except RuntimeError as error:
                print(f"{group.__name__}: {error}", flush=True)  # noqa: T201  this is a program
                worst = 4
            file.flush()
            if device == "cuda":
                torch.cuda.empty_cache()
    return worst


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
