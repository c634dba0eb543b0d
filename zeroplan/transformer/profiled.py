"""Parameters, blocks and head of a traced module. They come from its profile; no family's formulas apply."""

from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple, cast

from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, maximum, round_up
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.profile import Amount, Flash, GradientArrival, Part, Point, Profile, ProfiledPass, Tensor, Variant
from zeroplan.transformer.blocks import BackwardPoint, BlockPass, Compute, GradientArrivals, HeadPass
from zeroplan.transformer.families.tags import BLOCK_INPUT, FLASH_BACKWARD, FLASH_SCRATCH, SCRATCH
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter, operator_of

TRACE = "a trace of the module, in its profile"
BUFFERS = "torch 2.13, torch/nn/modules/module.py, Module.buffers"

_SYMBOLS = (
    ("constant", ""), ("micro_batch", "b"), ("seq_len", "s"), ("tokens", "T"), ("seq_len_squared", "s²"), ("tokens_seq_len", "T·s"),
    ("padding", ""),
)  # fmt: skip


def profile_of(model: ModelSpec) -> Profile:
    """Return the profile of a model that has one."""
    return cast("Profile", model.profile)


@lru_cache(maxsize=16)
def profiled_layout(profile: Profile) -> Layout:
    """Return the layout of a traced module. Its buffers are one line, since no engine shards them."""
    every = {tensor.name: _parameter(tensor) for tensor in profile.embeddings}
    cast = {one.name: one.autocast for one in profile.embeddings}
    named = profile.tied_head
    tied = None if named is None else every[named]._replace(autocast=cast[named])
    buffers = Line(Kind.PARAMETERS, profile.buffer_bytes, "buffers, whole on every rank", str(profile.buffer_bytes), BUFFERS)
    return Layout(
        tuple(every.values()),
        tuple(BlockRun(run.kind, run.layers, tuple(map(_parameter, profile.kinds[run.kind]))) for run in profile.runs),
        tuple(map(_parameter, profile.tail)),
        tied,
        (buffers,) if profile.buffer_bytes else (),
    )


def _parameter(tensor: Tensor) -> Parameter:
    return Parameter(tensor.name, tensor.shape, tensor.autocast, frozen=tensor.frozen)


_OTHER_KERNELS = {
    "cuda": "the module was traced with a CPU's kernels, and this estimate is for a GPU's",
    "cuda-7": "the module was traced with the attention kernels of newer GPUs: scores that this GPU keeps are not counted, so "
    "that the answer is too low",
    "cpu": "the module was traced with a GPU's kernels, and this estimate is for a CPU's",
}


def profiled_remarks(profile: Profile, compute: Compute) -> str:
    """Return sentences on what the profile does not cover exactly for ``compute``; empty if it covers everything."""
    variant = _variant(profile, compute)
    others = (_OTHER_KERNELS[compute.kernels],) if variant.kernels != compute.kernels else ()
    return " ".join(f"{remark}." for remark in dict.fromkeys((*variant.one.remarks, *variant.more.remarks, *others)))


def profiled_block(profile: Profile, kind: str, compute: Compute, batch: Batch) -> BlockPass:
    """Return the memory of one block of this kind, as traced with these settings."""
    one = _pass(profile, compute, batch)
    scale, block = _Scale(one, batch), one.blocks[kind]
    kept, block_input = (
        scale.parts(block.kept),
        (scale.line(Kind.ACTIVATIONS, block.input, "block input")._replace(tag=BLOCK_INPUT),),
    )
    recompute = compute.recompute
    forward = scale.most(Kind.TEMPORARY, block.forward, "temporaries at the highest point of the forward")
    return BlockPass(
        kept if recompute == "none" else (),
        kept if recompute == "full" else block_input,
        kept if recompute == "selective" else (),
        (forward,),
        (forward,),
        tuple(scale.point(point, compute) for point in block.points),
        block.cast_elements,
        handed=scale.handed(block.handed, profile.kinds[kind]),
    )


def profiled_head(profile: Profile, compute: Compute, batch: Batch) -> HeadPass:
    """Return the memory outside the blocks, with the module's own loss."""
    one = _pass(profile, compute, batch)
    scale = _Scale(one, batch)
    hidden = scale.line(Kind.ACTIVATIONS, one.blocks[profile.runs[0].kind].input, "")
    return HeadPass(
        shared=scale.parts(one.shared),
        saved=(),
        loss_forward=(scale.most(Kind.LOGITS, one.loss, "head and loss, at their highest"),),
        output=(scale.line(Kind.LOGITS, one.output, "what the module returns"),),
        hidden_bytes=hidden.n_bytes,
        forward=scale.parts(one.beside, Kind.TEMPORARY),
        first_input=(scale.line(Kind.TEMPORARY, one.first_input, "input of the first block, held by name"),),
        points=tuple(scale.point(point, compute, Kind.LOGITS) for point in one.head),
        hidden_formula=hidden.formula,
        below_blocks=(_below(scale.most(Kind.TEMPORARY, one.last, ""), hidden),),
        handed=scale.handed(one.head_handed, profile.tail),
        handed_below=scale.handed(one.last_handed, profile.embeddings),
    )


class Operations(NamedTuple):
    """Operations of one micro-batch's forward: matrix products in the blocks and outside them, and attention. [FLOPs]"""

    blocks: Int
    outside: Int
    attention: Int


def check_operations(profile: Profile) -> None:
    """Raise SpecError if no variant of the profile contains operation counts."""
    passes = [one for variant in profile.variants for one in (variant.one, variant.more)]
    if not any(_has_operations(one) for one in passes):
        raise SpecError(_NO_OPERATIONS.format(profile.name))


_NO_OPERATIONS = (
    "the profile of {} does not contain the number of operations of its module, so there is no step time; "
    "make a new one, or use --model or --config"
)


def _has_operations(one: ProfiledPass) -> bool:
    return one.operations is not None and all(block.operations is not None for block in one.blocks.values())


def profiled_operations(profile: Profile, compute: Compute, batch: Batch) -> Operations:
    """Return the operations counted in the trace; raise SpecError for a profile without counts."""
    one = _pass(profile, compute, batch)
    blocks, scale = [(one.blocks[run.kind].operations, run.layers) for run in profile.runs], _Scale(one, batch)
    if one.operations is None or not _has_operations(one):
        raise SpecError(_NO_OPERATIONS.format(profile.name))
    matrices, attention = 0 * scale.bytes(one.operations.matrices), scale.bytes(one.operations.attention)
    for each, layers in blocks:
        assert each is not None  # noqa: S101  checked above
        matrices = matrices + layers * scale.bytes(each.matrices)
        attention = attention + layers * scale.bytes(each.attention)
    return Operations(matrices, scale.bytes(one.operations.matrices), attention)


def without_recompute(profile: Profile, compute: Compute) -> Compute:
    """Return ``compute`` without recomputation if the profile has a trace of that, else ``compute`` itself."""
    wanted = (compute.element_bytes, compute.autocast, "none")
    there = any((one.element_bytes, one.autocast, one.recompute) == wanted for one in profile.variants)
    return compute._replace(recompute="none") if there else compute


def _below(most: Line, hidden: Line) -> Line:
    reason = "part before the blocks at its peak, beyond its incoming gradient"
    formula = f"max(0, {most.formula} - ({hidden.formula}))" if most.formula else ""
    return Line(Kind.TEMPORARY, maximum(0, most.n_bytes - hidden.n_bytes), reason, formula, TRACE)


def _pass(profile: Profile, compute: Compute, batch: Batch) -> ProfiledPass:
    """Return the traced pass for these settings; one sequence and several sequences have separate traces."""
    _check_length(profile, batch)
    _check_not_shorter(profile, batch)
    variant = _variant(profile, compute)
    is_one = batch.micro_batch_size == 1
    if isinstance(is_one, bool):
        return variant.one if is_one else variant.more
    if is_one.any() and not is_one.all():
        raise SpecError("micro-batches of one sequence and of several are different programs; estimate them in separate calls")
    return variant.one if is_one.all() else variant.more


def _check_length(profile: Profile, batch: Batch) -> None:
    differs = profile.seq_len is not None and batch.seq_len != profile.seq_len
    if differs if isinstance(differs, bool) else differs.any():
        raise SpecError(
            f"the profile of {profile.name} covers sequences of {profile.seq_len:,} tokens, not of {batch.seq_len}; leave "
            "--seq-len out, or make a profile of that length"
        )


def _check_not_shorter(profile: Profile, batch: Batch) -> None:
    shorter = batch.seq_len < profile.shortest
    if shorter if isinstance(shorter, bool) else shorter.any():
        raise SpecError(
            f"the profile of {profile.name} covers sequences of {profile.shortest:,} tokens and more, not of {batch.seq_len}; "
            "make another with --seq-len"
        )


def _variant(profile: Profile, compute: Compute) -> Variant:
    if compute.attention != profile.attention:
        raise SpecError(
            f"the profile of {profile.name} was made with attention {profile.attention!r}, not "
            f"{compute.attention!r}; leave --attention out, or make another profile"
        )
    wanted = (compute.element_bytes, compute.autocast, compute.recompute)
    found = [one for one in profile.variants if (one.element_bytes, one.autocast, one.recompute) == wanted]
    if not found:
        there = dict.fromkeys(_manner(one.element_bytes, one.autocast, one.recompute) for one in profile.variants)
        raise SpecError(
            f"the profile of {profile.name} does not cover {_manner(*wanted)}; it covers {', '.join(there)}; make one for "
            "that, too (of a script: zeroplan dryrun --profile all)"
        )
    return next((one for one in found if one.kernels == compute.kernels), found[0])


def _manner(element_bytes: int, autocast: bool, recompute: str) -> str:  # noqa: FBT001  a variant's key
    return f"{'autocast' if autocast else f'{8 * element_bytes} bits'} with recomputation {recompute}"


class _Scale:
    """Converts the amounts of a pass to bytes for one batch."""

    def __init__(self, one: ProfiledPass, batch: Batch) -> None:
        sequences, length = batch.micro_batch_size, round_up(batch.seq_len, one.counted_by)
        self._has_formulas = (
            one.counted_by == 1
        )  # else the formulas would be wrong: symbols mean the batch, not the next multiple
        self._sequences, self._length, self._multiple = sequences, length, one.seq_multiple
        tokens, padding = sequences * length, round_up(length, one.seq_multiple) - length
        self._values: tuple[Int, ...] = (
            1, sequences, length, tokens, length * length, tokens * length, sequences * padding,
        )  # fmt: skip

    def bytes(self, amount: Amount) -> Int:
        """Return an amount in bytes for this batch."""
        total: Int = 0
        for (name, _), value in zip(_SYMBOLS, self._values, strict=True):
            if times := getattr(amount, name):
                total = total + times * value
        return total

    def most(self, kind: Kind, amounts: tuple[Amount, ...], reason: str) -> Line:
        """Return the largest of several amounts as a line."""
        n_bytes = maximum(0, *(self.bytes(amount) for amount in amounts))
        formula = ", ".join(_formula(amount, self._multiple) for amount in amounts)
        return Line(kind, n_bytes, reason, f"max(0, {formula})" if self._has_formulas else "", TRACE)

    def line(self, kind: Kind, amount: Amount, reason: str) -> Line:
        """Return an amount as a line with its formula."""
        formula = _formula(amount, self._multiple) if self._has_formulas else ""
        return Line(kind, self.bytes(amount), reason, formula, TRACE)

    def parts(self, parts: tuple[Part, ...], kind: Kind = Kind.ACTIVATIONS) -> tuple[Line, ...]:
        """Return each kept part as a line."""
        return tuple(self.line(kind, part.amount, part.reason) for part in parts)

    def point(self, point: Point, compute: Compute, kind: Kind = Kind.ACTIVATIONS) -> BackwardPoint:
        """Return a moment of the backward, with the flash kernel's workspace where that kernel runs."""
        lines = (
            self.line(kind, point.saved, "saved, not yet freed"),
            self.line(kind, point.working, "gradients of activations, and temporaries"),
            *(() if point.flash is None or compute.kernels == "cpu" else (self._scratch(point.flash, compute),)),
        )
        return BackwardPoint(point.name, lines, point.gradients, point.current, point.casts)

    def handed(self, handed: tuple[GradientArrival, ...], tensors: tuple[Tensor, ...]) -> tuple[GradientArrivals, ...]:
        """Return the tensors alive when gradients reach their weights. A weight and its bias receive theirs together."""
        numel = {tensor.name: prod(tensor.shape) for tensor in tensors}
        found, made = list[GradientArrivals](), 0
        for _, together in groupby(handed, key=lambda one: operator_of(one.name)):
            first, *others = together
            made += sum(numel[one.name] for one in (first, *others))
            saved = self.line(Kind.ACTIVATIONS, first.saved, "saved, not yet freed")
            working = self.line(Kind.ACTIVATION_GRADIENTS, first.working, "gradients of activations")
            found.append(GradientArrivals(made, (saved, working)))
        return tuple(found)

    def _scratch(self, flash: Flash, compute: Compute) -> Line:
        filled = 32 if flash.head_dim <= 128 else 64
        row = 4 * flash.heads * (ceil_div(flash.head_dim, filled) * filled + 1)
        repeated = 0 if flash.heads == flash.kv_heads else 2 * compute.element_bytes * flash.heads * flash.head_dim
        length, shown = (flash.queries, str(flash.queries)) if flash.queries else (self._length, "s")
        rows: Int = ceil_div(length, 128) * 128 * self._sequences
        n_bytes: Int = row * rows + repeated * self._sequences * length
        formula = f"{row}·b·128·ceil({shown}/128) + {repeated}·b·{shown}"
        formula = formula if self._has_formulas else ""
        return Line(Kind.TEMPORARY, n_bytes, FLASH_SCRATCH, formula, FLASH_BACKWARD, SCRATCH)


@lru_cache(maxsize=4096)
def _formula(amount: Amount, multiple: int) -> str:
    terms = [_term(getattr(amount, name), symbol) for name, symbol in _SYMBOLS if getattr(amount, name) and name != "padding"]
    filled_up = [f"{amount.padding}·b·({multiple}·ceil(s/{multiple}) - s)"] if amount.padding else []
    return " + ".join([*reversed(terms), *filled_up]) or "0"


def _term(times: int, symbol: str) -> str:
    return f"{times}·{symbol}" if symbol else str(times)
