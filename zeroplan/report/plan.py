"""Renders a plan as text, Markdown and data: the best layout and its rivals; on request its memory and time in detail."""

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.planner.result import Best, Layout, More, Plan
from zeroplan.report.layout import layout_code, layout_words
from zeroplan.report.payload import SCHEMA_VERSION
from zeroplan.report.step import part_payload, rate_line, step_lines
from zeroplan.report.words import EXPANDABLE, WIDTH, item, kinds_by_size, model_words, notes_part, paragraphs, plural, spread
from zeroplan.resolve import OPTIONS
from zeroplan.resolve.options import value_of
from zeroplan.units import GB, GIB, format_size

_OF_A_ROW = 55
_DAY_S = 86_400
_MOST_OF_FRONT, _MOST_RULES, _LARGEST = 4, 4, 3


class Beside(NamedTuple):
    """Further inputs of the rendering: the layout's command, a token budget, a price, written files."""

    command: str
    tokens: int | None = None
    price_per_gpu_hour: float | None = None
    written: tuple[str, ...] = ()
    launch: str = ""
    notes: tuple[str, ...] = ()


def plan_text(plan: Plan, beside: Beside, *, verbose: bool = False) -> str:
    """Return the answer for a terminal, on one screen; ``verbose`` adds memory by kind, time by part and rejected layouts."""
    best = plan.best
    if best is None:
        answer = [list(_nothing(plan)), list(_fallen(plan))]
    elif verbose:
        answer = [
            list(_best(plan.objective, best, beside)), list(_rankings(plan)), list(_memory(best)),
            [*step_lines(best.time, best.layout.job.mesh.world_size), *_budget(best.layout, beside)], list(_why(best)),
            list(_others(plan)), list(_front(plan)), list(_fallen(plan)),
        ]  # fmt: skip
    else:
        lines = [*_best(plan.objective, best, beside), *_in_short(best, beside), *_why(best)]
        more = "--verbose adds memory by kind, time by part, time against memory, and why other layouts were rejected."
        answer = [lines, list(_rankings(plan)), list(_others(plan)), [more]]
    return paragraphs([list(_head(plan)), *answer, notes_part([*plan.notes, *beside.notes])])


def plan_markdown(plan: Plan, beside: Beside) -> str:
    """Return the whole plan as Markdown, with the terminal's tables."""
    best = "Nothing fits" if plan.best is None else layout_words(plan.best.layout.job)
    command = f"\n\n`{beside.command}`" if plan.best is not None else ""
    return f"## {best}{command}\n\n```text\n{plan_text(plan, beside, verbose=True)}\n```"


def _head(plan: Plan) -> Iterator[str]:
    base, gpu = plan.base, plan.base.cluster.gpu
    gpus = plural(base.mesh.world_size, "GPU") if gpu is None else f"{base.mesh.world_size:,} x {gpu.full_name}"
    recipe, tokens = base.recipe, plural(base.batch.seq_len, "token")
    yield f"{model_words(base)} on {gpus}, {recipe.precision}, {recipe.optimizer}, {tokens} per sequence"
    yield f"{plural(plan.considered, 'layout')} considered, {plan.evaluated:,} of them computed"


def _best(objective: str, best: Best, beside: Beside) -> Iterator[str]:
    yield from textwrap.wrap(f"Best for {objective}: {layout_words(best.layout.job)}", WIDTH)
    yield f"  {beside.command}"
    for path in beside.written:
        yield f"  written: {path}"
    if beside.launch:
        yield f"  {beside.launch}"


def _in_short(best: Best, beside: Beside) -> Iterator[str]:
    """Yield the layout's memory and step time, with the largest parts of each, and its tokens/s."""
    layout, room, whole = best.layout, best.estimate.capacity_bytes or 0, float(best.time.seconds)
    kinds = ", ".join(f"{kind.value} {n / GIB:,.2f}" for kind, n in kinds_by_size(best.estimate.peak.lines)[:_LARGEST])
    parts = sorted(best.time.parts, key=lambda part: -float(part.seconds))[:_LARGEST]
    shares = ", ".join(f"{part.name} {float(part.seconds) / whole:.0%}" for part in parts)
    peak = f"{layout.least_bytes / GIB:,.2f} of {room / GIB:,.2f} GiB at the peak"
    cached = f"{layout.comfortable_bytes / GIB:,.2f} with what the allocator caches"
    for said in (f"{peak}, {cached}; most of it {kinds}", f"{whole:,.3f} s for a step; most of it {shares}"):
        yield from textwrap.wrap(said, WIDTH, break_on_hyphens=False)
    yield rate_line(best.time, layout.job.mesh.world_size)
    yield from _beside_the_card(best)
    yield from _budget(layout, beside)


def _memory(best: Best) -> Iterator[str]:
    yield f"{'Memory of a GPU':<44}{'GiB':>10}{'GB':>10}"
    for kind, n_bytes in kinds_by_size(best.estimate.peak.lines):
        yield _row(f"  {kind.value}", n_bytes)
    yield _row("  context and communicators", int(best.estimate.outside_band.expected_bytes))
    yield _row("  together, at the peak", best.layout.least_bytes)
    yield _row("  with what the allocator caches", best.layout.comfortable_bytes)
    yield _row("  the GPU has", best.estimate.capacity_bytes or 0)
    yield f"  at this moment: {best.estimate.peak.name}"
    yield from _beside_the_card(best)


def _beside_the_card(best: Best) -> Iterator[str]:
    """Yield the host memory that the layout needs, if any, and whether the GPU is nearly full."""
    if best.estimate.host_bytes:
        node = (best.estimate.host_bytes_per_node or 0) / GIB
        of_node = f"{node:,.2f} GiB per node, which must have that much"
        yield f"host memory: {best.estimate.host_bytes / GIB:,.2f} GiB per rank, {of_node}"
    if best.tight:
        yield f"tight: the peak fits, but not with the allocator's cache and the margin; set {EXPANDABLE}"


def _row(what: str, n_bytes: int) -> str:
    return f"{what:<44.44}{n_bytes / GIB:>10,.2f}{n_bytes / GB:>10,.2f}"


def days(best: Layout, tokens: int) -> float:
    """Return the time of a token budget. [days]"""
    return tokens / (best.tokens_per_s * best.job.mesh.world_size) / _DAY_S


def cost(best: Layout, tokens: int, price_per_gpu_hour: float) -> float:
    """Return the cost of a token budget, in the currency of the price."""
    return tokens / best.tokens_per_s / 3600 * price_per_gpu_hour


def _budget(best: Layout, beside: Beside) -> Iterator[str]:
    price, tokens = beside.price_per_gpu_hour, beside.tokens
    if tokens is not None:
        money = "" if price is None else f" and cost {cost(best, tokens, price):,.0f} at {price:,.2f} per GPU and hour"
        yield f"{tokens:,} tokens take {days(best, tokens):,.1f} days{money}"
    elif price is not None:
        yield f"a million tokens cost {cost(best, 10**6, price):,.4f} at {price:,.2f} per GPU and hour"


def _why(best: Best) -> Iterator[str]:
    yield f"Limited by {best.binding}"
    if (more := best.one_more_gib) is not None:
        yield from textwrap.wrap(f"One more GiB would make it {more.gain:.1%} faster: {layout_words(more.layout.job)}", WIDTH)
    elif best.further is None:
        yield "More memory would not make it faster."
    if (kept := best.margin) is not None:
        reason = f"With {kept.missing_bytes / GIB:,.2f} GiB of the margin (--margin) it would be {kept.gain:.1%} faster"
        yield from textwrap.wrap(f"{reason}: {layout_words(kept.layout.job)}", WIDTH)


def _others(plan: Plan) -> Iterator[str]:
    if not plan.rivals:
        return
    yield "The next ones, and why they are not the best"
    for rival in plan.rivals:
        yield item(f"{rival.usual}: " * bool(rival.usual) + layout_code(rival.layout.job))
        yield from textwrap.wrap(rival.why_not, WIDTH, initial_indent="      ", subsequent_indent="      ")


def _rankings(plan: Plan) -> Iterator[str]:
    if not plan.rankings:
        return
    yield f"{'Three rankings, and the memory that each leaves free':<58}{'GiB free':>8}{'tokens/s per GPU':>20}"
    first = plan.rankings[0]
    for one in plan.rankings:
        if one is not first and one.layout.job == first.layout.job:
            yield f"  {one.ranking}: the same as {first.ranking}"
        else:
            yield from _of_table(f"{one.ranking}: {layout_code(one.layout.job)}", one.free_bytes, one.layout.tokens_per_s)
    if len(plan.rankings) < 3:
        yield "  cheapest: the same as fastest; fewer GPUs, without offload, would not be clearly cheaper"


def _of_table(words: str, n_bytes: int, rate: float) -> Iterator[str]:
    """Yield a row, with the figures on a second line if the words are long; spare memory below zero prints as ``tight``."""
    memory = f"{n_bytes / GIB:,.1f}" if n_bytes >= 0 else "tight"
    if len(words) > _OF_A_ROW:
        yield f"  {words}"
        words = ""
    yield f"  {words:<{_OF_A_ROW + 1}}{memory:>8}{rate:>20,.0f}"


def _front(plan: Plan) -> Iterator[str]:
    if len(plan.front) < 2:
        return
    yield f"{'Time against memory: nothing is both faster and smaller':<58}{'GiB':>8}{'tokens/s per GPU':>20}"
    for one in spread(plan.front, _MOST_OF_FRONT):
        yield from _of_table(layout_code(one.job), one.least_bytes, one.tokens_per_s)


def _nothing(plan: Plan) -> Iterator[str]:
    gpu = plan.base.cluster.gpu
    room = 0 if gpu is None else int(gpu.memory_bytes.value)
    yield f"Nothing fits {'' if gpu is None else gpu.full_name} ({format_size(room)}). The closest:"
    for rival in plan.rivals:
        yield item(layout_words(rival.layout.job))
        yield f"      {rival.why_not}"
    if plan.fallen:
        most = max(plan.fallen, key=lambda one: one.layouts)
        yield f"The rule that rejected most: {most.rule.value} ({plural(most.layouts, 'layout')})"


def _fallen(plan: Plan) -> Iterator[str]:
    if not plan.fallen:
        return
    yield "Rejected layouts, by rule"
    most_first = sorted(plan.fallen, key=lambda one: -one.layouts)
    for one in most_first[:_MOST_RULES]:
        yield f"  {one.layouts:>8,}  {one.rule.value}"
        if one.example:
            yield from textwrap.wrap(one.example, WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 12)
    if others := most_first[_MOST_RULES:]:
        yield f"  {sum(one.layouts for one in others):>8,}  others (--json has every rule)"


def plan_payload(plan: Plan, beside: Beside) -> dict[str, object]:
    """Return the answer as plain data; sizes in bytes, times in seconds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "objective": plan.objective,
        "fits": plan.best is not None,
        "considered": plan.considered,
        "evaluated": plan.evaluated,
        "fallen": [{"rule": one.rule.value, "layouts": one.layouts, "example": one.example} for one in plan.fallen],
        "best": None if plan.best is None else {**layout_payload(plan.best.layout), **_detail(plan.best, beside)},
        "rivals": [{**layout_payload(one.layout), "why_not": one.why_not, "usual": one.usual} for one in plan.rivals],
        "rankings": [
            {**layout_payload(one.layout), "ranking": one.ranking, "free_bytes": one.free_bytes} for one in plan.rankings
        ],
        "front": [layout_payload(one) for one in plan.front],
        "notes": [*plan.notes, *beside.notes],
        "written": list(beside.written),
    }


_OF_A_LAYOUT = frozenset({
    "engine", "stage", "recompute", "recompute_layers", "loss", "optimizer", "precision", "optimizer_impl", "replicas",
    "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "pipeline_schedule", "seq_len", "micro_batch",
    "grad_accum",
})  # fmt: skip


def layout_payload(one: Layout) -> dict[str, object]:
    """A layout as plain data; sizes in bytes, times in seconds."""
    return {
        "layout": layout_words(one.job),
        **{each.field: value_of(one.job, each) for each in OPTIONS.values() if each.field in _OF_A_LAYOUT},
        "offload": one.job.recipe.offloads,
        "shards": one.job.mesh.dp_shard,
        "least_bytes": one.least_bytes,
        "comfortable_bytes": one.comfortable_bytes,
        "step_s": one.seconds,
        "tokens_per_s_per_gpu": one.tokens_per_s,
    }


def _detail(best: Best, beside: Beside) -> dict[str, object]:
    detail: dict[str, object] = {
        "command": beside.command,
        "launch": beside.launch,
        "tight": best.tight,
        "host_bytes_per_node": best.estimate.host_bytes_per_node,
        "binding": best.binding,
        "one_more_gib": _more(best.one_more_gib),
        "margin": _more(best.margin),
        "mfu": float(best.time.mfu),
        "parts": [part_payload(one) for one in best.time.parts],
    }
    if beside.tokens is not None:
        detail["days"] = days(best.layout, beside.tokens)
    if beside.price_per_gpu_hour is not None:
        detail["cost"] = cost(best.layout, beside.tokens or 10**6, beside.price_per_gpu_hour)
    return detail


def _more(more: More | None) -> dict[str, object] | None:
    return None if more is None else {**layout_payload(more.layout), "gain": more.gain, "missing_bytes": more.missing_bytes}
