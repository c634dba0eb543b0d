"""Tables of the model's own memory: what a block saves, its backward, and the head with the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.docs.generated.jobs import example
from tests.docs.generated.ledger import lines
from tests.docs.generated.markdown import Sources, code, gigabytes, once, table
from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import Kind
from zeroplan.spec.batch import BatchSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.legend import SYMBOLS, legend
from zeroplan.transformer.params import layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zeroplan import JobSpec, Line
    from zeroplan.spec.recipe import Loss
    from zeroplan.transformer.blocks import BlockPass

#: One model of each family, with the family's name, in the order of the page.
FAMILIES = {
    "llama-3.1-8b": "Llama", "mistral-7b-v0.3": "Mistral", "qwen2.5-7b": "Qwen2", "qwen3-8b": "Qwen3", "phi-3-mini": "Phi-3",
    "gemma-2-9b": "Gemma 2", "gemma-3-4b": "Gemma 3", "gpt2-xl": "GPT-2", "pythia-6.9b": "GPT-NeoX", "opt-6.7b": "OPT",
    "bloom-7b1": "BLOOM", "mixtral-8x7b": "Mixtral", "qwen3-30b-a3b": "Qwen3-MoE", "deepseek-v3": "DeepSeek-V3",
    "gpt-oss-20b": "gpt-oss",
}  # fmt: skip
_TOKENS = 1024
_KIND = {"dense": "dense", "moe": "of experts", "local": "with a sliding window", "global": "with full attention"}


class _Block(NamedTuple):
    title: str
    """The kind of block, in words."""
    of: BlockPass


def _job(model: str, **said: object) -> JobSpec:
    return example(model=model, gpus=64, seq_len=_TOKENS, **said).job


def _blocks(job: JobSpec) -> list[_Block]:
    kinds = dict.fromkeys(run.kind for run in layout(job.model).runs)
    batch = BatchSpec(micro_batch_size=1, seq_len=_TOKENS)
    return [_Block(_KIND[kind], block_pass(job.model, kind, compute_of(job.recipe), batch)) for kind in kinds]


def saved() -> str:
    """Return what a block of each family keeps for its backward, by recomputation; families with equal tables share one."""
    sources = Sources()
    tables: dict[str, list[str]] = {}
    for model, family in FAMILIES.items():
        for block in _blocks(_job(model)):
            kind = "" if block.title == "dense" else f", a block {block.title}"
            tables.setdefault(_kept(block.of, sources), []).append(family + kind)
    parts = [f"### {'; '.join(names)}\n\n{rows}" for rows, names in tables.items()]
    return "\n".join([*parts, "### Where this is read\n", sources.listed()])


def _kept(block: BlockPass, sources: Sources) -> str:
    """Return a table of the block's tensors, and under which recomputation each is kept."""
    kept = {"none": block.saved, "selective": block.selective, "full": block.checkpoint}
    every = {(line.reason, line.formula, line.source): line for some in kept.values() for line in some}
    rows = []
    for (reason, formula, source), line in every.items():
        under = ["yes" if any(_same(line, one) for one in some) else "" for some in kept.values()]
        rows.append((reason, code(formula), *under, sources.number(source)))
    return table(("what", "bytes", *kept, "source:"), rows)


def _same(one: Line, other: Line) -> bool:
    return (one.reason, one.formula) == (other.reason, other.formula)


def autocast(model: str) -> str:
    """Return the differences in a block's saved tensors under autocast, which DDP uses."""
    plain, cast = (_blocks(_job(model, engine=engine, stage=0))[0].of.saved for engine in ("deepspeed", "ddp"))
    here = {line.reason: line.formula for line in plain}
    element = {"deepspeed": "16-bit weights", "ddp": "autocast"}
    rows = [
        (line.reason, code(here.get(line.reason, "")), code(line.formula))
        for line in cast
        if here.get(line.reason) != line.formula
    ]
    gone = [(reason, code(formula), "") for reason, formula in here.items() if reason not in {line.reason for line in cast}]
    sums = [
        (
            "together, GB",
            gigabytes(int(sum(line.n_bytes for line in plain))),
            gigabytes(int(sum(line.n_bytes for line in cast))),
        )
    ]
    return table(("what", *element.values()), [*rows, *gone, *sums])


def backward(model: str) -> str:
    """Return the points of a block's backward at which memory can peak.

    Each has its gradients and temporaries, and the number of saved tensors still alive.
    """
    sources = Sources()
    parts = []
    for block in _blocks(_job(model)):
        rows = [
            (
                point.name,
                _left(point.lines, block.of.saved),
                str(line.kind),
                line.reason,
                code(line.formula),
                sources.number(line.source),
            )
            for point in block.of.points
            for line in point.lines
            if line.kind is not Kind.ACTIVATIONS
        ]
        parts.append(table(("at", "saved tensors alive", "kind", "what", "bytes", "source:"), _both_once(rows)))
    return "\n".join([*parts, sources.listed()])


def _left(alive: tuple[Line, ...], saved: tuple[Line, ...]) -> str:
    left = {line.reason for line in alive if line.kind is Kind.ACTIVATIONS}
    return f"{sum(line.reason in left for line in saved)} of {len(saved)}"


def _both_once(rows: list[tuple[str, ...]]) -> list[Sequence[str]]:
    joined = once((f"{at}\n{left}", *rest) for at, left, *rest in rows)
    return [(*(first.split("\n") if first else ("", "")), *rest) for first, *rest in joined]


def loss(name: Loss) -> str:
    """Return the memory of the head and the loss: in the forward, and at each point of the backward down to the final norm."""
    job = _job("llama-3.1-8b")
    head = head_pass(job.model, compute_of(job.recipe), BatchSpec(micro_batch_size=1, seq_len=_TOKENS), loss=name)
    sources = Sources()
    groups = [("kept for the backward", (*head.saved, *head.loss)), ("forward of the loss", head.loss_forward)]
    groups += [(f"backward: {point.name}", _passing(point.lines)) for point in head.points]
    rows = [
        (title, str(line.kind), line.reason, code(line.formula), sources.number(line.source))
        for title, some in groups
        for line in some
    ]
    return table(("when", "kind", "what", "bytes", "source:"), once(rows)) + "\n" + sources.listed()


def _passing(some: tuple[Line, ...]) -> tuple[Line, ...]:
    return tuple(line for line in some if line.kind is not Kind.ACTIVATIONS)


def outside() -> str:
    """Return the tensors outside the blocks that stay alive during the whole forward, some of them to the end of the backward."""
    job = _job("llama-3.1-8b")
    head = head_pass(job.model, compute_of(job.recipe), BatchSpec(micro_batch_size=1, seq_len=_TOKENS))
    return lines((*head.shared, *head.forward, *head.first_input))


def legend_of_the_model() -> str:
    """Return the symbols of the model's formulas, with their values for two models."""
    answers = [_job(model) for model in ("llama-3.1-8b", "deepseek-v3")]
    values = [legend(job.model, compute_of(job.recipe), BatchSpec(micro_batch_size=1, seq_len=_TOKENS)) for job in answers]
    common = [
        ("Ψ", "parameters", *(f"{example(model=model, gpus=64).parameters:,}" for model in ("llama-3.1-8b", "deepseek-v3"))),
        ("L", "blocks", *(f"{job.model.num_hidden_layers:,}" for job in answers)),
        ("N", "ranks that share one copy", *(f"{job.mesh.dp_shard:,}" for job in answers)),
    ]
    rows = [(name, meaning, *(f"{int(some[name]):,}" for some in values)) for name, meaning in SYMBOLS.items()]
    return table(("symbol", "what", "Llama 3.1 8B:", "DeepSeek-V3:"), [(code(name), *rest) for name, *rest in (*common, *rows)])
