"""From a block's program to what it costs: the program runs once per structure, its sizes have values for every batch."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.ledger import Kind, Line, Module, OffGpu, Tag
from zeroplan.numeric import Bool, Int, maximum, where
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass, HandedOn, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import head_size
from zeroplan.transformer.families.attention import CUDA_ALONE
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.norms import AT_FINAL_NORM, LAYER_FINAL, LAYER_NORM, FinalNorm
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.parts import BLOCK_INPUT, INCOMING
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Alive, Handed, Store, Tape, Value, Width
from zeroplan.transformer.families.widths import Widths, beyond_the_window, quantities
from zeroplan.transformer.symbols import T, h, r


def program_of(family: str) -> Program:
    """A family's program, or torchtitan's own."""
    if family == "torchtitan":
        from zeroplan.transformer.families.torchtitan import PROGRAM  # noqa: PLC0415  others need not wait for it

        return PROGRAM
    return definition_of(family).program


#: Families whose forward can be higher than any moment of the backward: their experts hold biases for every pair, or
#: pairs that were sent and came back; Qwen3 holds queries and keys before and after their norms; Granite ends with a product
#: beside the sum that takes it.
RECOMPUTED_HIGHER = frozenset({"gpt_oss", "mixtral", "qwen3_moe", "qwen3", "deepseek_v3", "granite"})

#: The reasons of lines that say how far an earlier moment of a forward is above its last one, and how much of that is because
#: CUDA's autocast makes fp32 of tensors.
EXCESS = "attention, beyond the later peak"
CUDA_EXCESS = "tensors in fp32 under autocast, beyond the later peak, on CUDA"

Places = tuple[int, ...]


class Placed(NamedTuple):
    """A moment whose tensors and weights stand as their places among a plan's."""

    name: str
    stores: Places
    gradients: Places
    current: Places
    casts: Places
    place: Place
    before: Places


class Forward(NamedTuple):
    """A forward: its moments, the last of which is its end, what it keeps, and what there is when the experts begin."""

    moments: tuple[Placed, ...]
    kept: Places
    before_experts: Places


class HandedPlaces(NamedTuple):
    """When gradients come to their weights: those made so far, and what is alive then, as places."""

    gradients: Places
    stores: Places


@dataclass(frozen=True, eq=False, slots=True)  # the same only as itself, so that what is worked out of it once is found at once
class Plan:
    """What a structure's runs came to: who is alive when, with expressions for sizes."""

    stores: tuple[Store, ...]
    weights: tuple[Size, ...]
    """Elements of weights."""
    forwards: Mapping[Recompute, Forward]
    """Without a checkpoint, and in a full and in a selective one."""
    points: tuple[Placed, ...]
    casts: Places
    selective: Places
    """What per-operation recomputation keeps: every second plain matrix product, and the outputs of attention's kernel."""
    given: Places
    source: str
    again: Mapping[Recompute, tuple[Placed, ...]]
    """Moments of running the forward again for the backward that may be higher than any of the backward's own."""
    handed: tuple[HandedPlaces, ...] = ()
    """When gradients come to their weights, in order."""

    @property
    def saved(self) -> Places:
        """What stays from the forward to the backward, without a checkpoint."""
        return self.forwards["none"].kept

    @property
    def input_apart(self) -> Places:
        """What the block is given, unless the block saves it."""
        return tuple([place for place in self.given if place not in self.saved])


class Index:
    """Gives every store and every size of a weight its place, in the order they come."""

    def __init__(self) -> None:
        """Begin with none."""
        self.stores: dict[Store, int] = {}
        self.weights: dict[Size, int] = {}

    def of(self, stores: Iterable[Store]) -> Places:
        """Places of stores."""
        return tuple(self.stores.setdefault(store, len(self.stores)) for store in stores)

    def elements(self, sizes: Iterable[Size]) -> Places:
        """Places of weights."""
        return tuple(self.weights.setdefault(size, len(self.weights)) for size in sizes)

    def moments(self, moments: Iterable[Alive]) -> tuple[Placed, ...]:
        """Moments, with places for what is alive; of several with one name the later ones are numbered."""
        named = Counter[str]()
        placed = list[Placed]()
        for one in moments:
            named[one.name] += 1
            times = named[one.name]
            placed.append(self._placed(one, one.name if times == 1 else f"{one.name} ({times})"))
        return tuple(placed)

    def _placed(self, one: Alive, name: str) -> Placed:
        stores = self.of(one.stores)
        made, making, copied = map(self.elements, (one.gradients, one.current, one.casts))
        return Placed(name, stores, made, making, copied, one.place, self.of(one.before))

    def handed(self, handed: Iterable[Handed]) -> tuple[HandedPlaces, ...]:
        """When gradients come to their weights."""
        return tuple([HandedPlaces(self.elements(one.gradients), self.of(one.stores)) for one in handed])

    def forward(self, tape: Tape, kept: Iterable[Store], dtypes: dict[str, bool]) -> Forward:
        """What a tape has run so far."""
        moments = highest(tape.moments, **dtypes)
        end = () if moments[-1] == tape.moments[-1] else tape.moments[-1:]
        return Forward(self.moments((*moments, *end)), self.of(kept), self.of(tape.entered.get(Module.EXPERTS, ())))


def traced_block(model: ModelSpec, kind: str, x: Widths, recompute: Recompute, *, ring: int = 1) -> BlockPass:
    """One block by its family's program, of sequences that ``ring`` ranks share; its experts may be on several ranks.

    Where it is recomputed, moments of that may be among the backward's.

    A window shorter than the sequence, or as long, is a mask (transformers 5.23, masking_utils.py, _ignore_causal_mask_sdpa).
    """
    dense, is_masked = kind != "moe", kind != "global" and beyond_the_window(model, x)
    return by_mask(is_masked, lambda masked: _of(model, x, recompute, masked=masked, dense=dense, ring=ring))


def torchtitan_block(model: ModelSpec, x: Widths, recompute: Recompute) -> BlockPass:
    """One block of torchtitan's Llama 3."""
    attention, grouped, one_key = x.attention, x.key != x.query, x.key == x.head_dim
    plan = _plan(Block("torchtitan", x.element == 4, False, attention, False, grouped, one_key, False, x.kernels))
    return pass_of(Sizes(plan, quantities(x, model.intermediate_size)), autocast=False, recompute=recompute)


#: Whose block the dense layers of a family with experts are.
_DENSE_LAYERS = {"qwen3_moe": "qwen3"}


def _of(
    model: ModelSpec, x: Widths, recompute: Recompute, *, masked: bool, dense: bool, ring: int
) -> BlockPass:  # fmt: skip
    structure = Block(
        _DENSE_LAYERS.get(model.family, model.family) if dense else model.family,
        x.element == 4,
        x.autocast,
        x.attention,
        masked,
        x.key != x.query,
        x.key == x.head_dim,
        model.attention_bias,
        x.kernels,
        model.parallel_residual,
        model.activation,
        model.attention_bias and model.family != "qwen2",
        model.mlp_bias,
        recompute != "none" and model.moe is not None,
        x.expert_ranks > 1,
        ring,
        head_size(max(x.head_dim, x.context // x.heads)),
        not dense,
        model.mla is not None and model.mla.q_lora_rank is not None,
        x.casts_inputs,
        model.mla is not None and x.context == x.query,
        model.family == "bloom" and model.num_hidden_layers == 1,
    )
    plan = _plan(structure)
    sizes = Sizes(plan, quantities(x, model.intermediate_size, model.moe, model.mla))
    return pass_of(sizes, autocast=x.autocast, recompute=recompute)


def by_mask(is_masked: Bool, one: Callable[[bool], BlockPass]) -> BlockPass:
    """A block whose attention is given a mask, or none; of a column of batches some one and some the other."""
    return one(is_masked) if isinstance(is_masked, bool) else _either(is_masked, one(True), one(False))


def _either(condition: Bool, yes: BlockPass, no: BlockPass) -> BlockPass:
    """One pass for a column of batches, some of which are of one kind and some of the other: lines of both, those of one nought."""
    made: dict[int, Line] = {}  # a tensor that is there at several points stays one line

    def where_so(line: Line) -> Line:
        return made.setdefault(id(line), line._replace(n_bytes=where(condition, line.n_bytes, 0)))

    def where_not(line: Line) -> Line:
        return made.setdefault(id(line), line._replace(n_bytes=where(condition, 0, line.n_bytes)))

    def lines(first: tuple[Line, ...], second: tuple[Line, ...]) -> tuple[Line, ...]:
        return (*map(where_so, first), *map(where_not, second))

    return BlockPass(
        lines(yes.saved, no.saved),
        yes.checkpoint,
        lines(yes.selective, no.selective),
        lines(yes.forward, no.forward),
        lines(yes.forward_recompute, no.forward_recompute),
        (
            *(_with_lines(point, lambda some: lines(some, ())) for point in yes.points),
            *(_with_lines(point, lambda some: lines((), some)) for point in no.points),
        ),
        yes.cast_elements,
        yes.checkpoint_in_backward,
        handed=tuple(
            [HandedOn(one.gradients, lines(one.lines, other.lines)) for one, other in zip(yes.handed, no.handed, strict=True)]
        ),
        before_experts=lines(yes.before_experts, no.before_experts),
    )


def _with_lines(point: BackwardPoint, made_of: Callable[[tuple[Line, ...]], tuple[Line, ...]]) -> BackwardPoint:
    return point._replace(
        lines=made_of(point.lines),
        before=made_of(point.before),
    )


def final_norm(model: ModelSpec, x: Widths) -> FinalNorm:
    """The final norm of a family that is written as a program; its gradients count the norm's own weight only."""
    plan = _final_plan(model.family, wide=x.element == 4, autocast=x.autocast)
    return Sizes(plan, quantities(x, model.intermediate_size, model.moe)).norm()


@lru_cache(maxsize=64)
def _final_plan(family: str, *, wide: bool, autocast: bool) -> Plan:
    program = program_of(family)
    return norm_plan(
        Tape(wide=wide, autocast=autocast, saving=True), (r, T * h), partial(_final, norm=program.norm), program.source
    )


def _final(tape: Tape, given: Value, *, norm: NormAs | None) -> Value:
    """The norm before the head."""
    if norm is None:
        return op.layer_norm(tape, given, LAYER_FINAL, LAYER_NORM)
    return op.rms_norm(tape, given, "final norm", norm, place=AT_FINAL_NORM)


def norm_plan(tape: Tape, read: tuple[Width, Size], norm: Callable[[Tape, Value], Value], source: str) -> Plan:
    """Run a norm outside the blocks forward and backward over what it has to read, a dtype and a shape."""
    index, (dtype, shape) = Index(), read
    given = Value(tape.make(Kind.ACTIVATIONS, "final norm: its input", dtype * shape, source), dtype, shape)
    made = norm(tape, given)
    forward = index.forward(tape, tape.saved, {"wide": tape.wide, "autocast": tape.autocast})
    tape.release(made, given)
    tape.run_backward(made, Store(Kind.ACTIVATION_GRADIENTS, "gradient of the final norm's output", dtype * shape, source))
    points = index.moments(highest(tape.moments, wide=tape.wide, autocast=tape.autocast))
    return Plan(tuple(index.stores), tuple(index.weights), {"none": forward}, points, (), (), (), source, {})


@lru_cache(maxsize=256)
def _plan(structure: Block) -> Plan:
    index, source = Index(), program_of(structure.family).source
    dtypes = {"wide": structure.wide, "autocast": structure.autocast, "latent": structure.family == "deepseek_v3"}
    saving, given = _run(structure, saving=True)
    forward, casts = index.forward(saving, saving.saved, dtypes), index.elements(saving.casts)
    output = next(iter(saving.operators[-1].outputs))
    saving.release(output, given)
    incoming = Store(Kind.ACTIVATION_GRADIENTS, "gradient of the residual stream", r * output.shape, source, INCOMING)
    whole, until_saved = saving.moments.copy(), saving.until_last_saved(done=False)
    saving.run_backward(output, incoming)
    points = index.moments(highest(saving.moments, **dtypes, scratch_apart=structure.ring > 1))
    reruns: dict[Recompute, tuple[Placed, ...]] = {}
    if structure.family in RECOMPUTED_HIGHER:
        reruns["full"] = index.moments(run_again(saving, until_saved, given.store, dtypes))
        reruns["selective"] = index.moments(run_again(saving, with_kept(whole, saving), given.store, dtypes))
    selective = index.of(saving.kept())
    made = forwards(
        index,
        forward,
        given.store,
        lambda keeping: _run(structure, saving=False, given=given.store, keeping=keeping)[0],
        dtypes,
    )
    places, handed = index.of((given.store, *saving.copied)), index.handed(saving.handed)
    stores, weights = tuple(index.stores), tuple(index.weights)
    return Plan(stores, weights, made, points, casts, selective, places, source, reruns, handed)


def forwards(
    index: Index, plain: Forward, given: Store, run: Callable[[bool], Tape], dtypes: dict[str, bool]
) -> dict[Recompute, Forward]:  # fmt: skip
    """The forward without a checkpoint, and those in a full and in a selective one; ``run`` is told whether something is kept."""

    def forward(*, keeping: bool) -> Forward:
        tape = run(keeping)
        return index.forward(tape, (given, *tape.copied, *(tape.kept() if keeping else ())), dtypes)

    return {"none": plain, "full": forward(keeping=False), "selective": forward(keeping=True)}


def with_kept(moments: list[Alive], tape: Tape) -> list[Alive]:
    """Moments of a run whose dear outputs are there from the beginning, where it makes them anew."""
    first = {store: at for at, moment in reversed(list(enumerate(moments))) for store in moment.stores}
    kept = tape.kept()
    return [
        moment._replace(stores=(*moment.stores, *(store for store in kept if first.get(store, 0) > at)))
        for at, moment in enumerate(moments)
    ]


def run_again(tape: Tape, moments: list[Alive], given: Store, dtypes: dict[str, bool]) -> list[Alive]:
    """Moments of a checkpoint that is run again, beside gradients that wait; those that the backward itself is above left out.

    The block's input is the checkpoint's own, unless the block saves it.
    """
    beside = [
        one._replace(
            name="forward, run again",
            place=Place(At.RUN_AGAIN),
            stores=(*(store for store in one.stores if store is not given or given in tape.saved), *tape.before_saved),
        )
        for one in moments
    ]
    return [one for one in highest([*tape.moments, *beside], **dtypes) if one in beside]


def _run(structure: Block, *, saving: bool, given: Store | None = None, keeping: bool = False) -> tuple[Tape, Value]:
    """Run the program forward, over an input that another run has had, or over one of its own."""
    program = program_of(structure.family)
    tape = Tape(
        wide=structure.wide, autocast=structure.autocast, saving=saving, keeping=keeping, again=structure.again
    )  # fmt: skip
    value = block_input(tape, given, (r, T * h), program.source)
    program.block(tape, value, structure)
    return tape, value


def block_input(tape: Tape, given: Store | None, read: tuple[Width, Size], source: str) -> Value:
    """What a block reads, a dtype and a shape: what another run has had, or a tensor of its own."""
    dtype, shape = read
    if given is None:
        return Value(tape.make(Kind.ACTIVATIONS, "block input", dtype * shape, source, BLOCK_INPUT), dtype, shape)
    given.holds = 1
    tape.alive[given] = None
    return Value(given, dtype, shape)


class Texts(NamedTuple):
    """What of a plan's lines is the same for every batch."""

    sizes: tuple[Size, ...]
    """Those that there are, each once."""
    size_of: Places
    """Where among them each tensor's is."""
    lines: tuple[tuple[Kind, str, str, str, Tag], ...]
    """Of each tensor all but the bytes: kind, reason, formula, source and tag."""


@lru_cache(maxsize=256)
def _texts(plan: Plan) -> Texts:
    places: dict[Size, int] = {}
    size_of = tuple([places.setdefault(store.size, len(places)) for store in plan.stores])
    lines = tuple([(store.kind, store.reason, store.size.text, store.source, store.tag) for store in plan.stores])
    return Texts(tuple(places), size_of, lines)


@lru_cache(maxsize=256)
def _backward(plan: Plan, recompute: Recompute) -> tuple[Placed, ...]:
    """The moments of the backward, those of running the forward again among them."""
    return (*plan.again.get(recompute, ()), *plan.points)


@lru_cache(maxsize=256)
def _handed(plan: Plan, recompute: Recompute, weights: tuple[int, ...]) -> tuple[tuple[int, Places], ...]:
    """When gradients come to their weights: elements of those made so far, and what is alive; a checkpoint's input with it."""
    beside = () if recompute == "none" else plan.input_apart
    return tuple((_sum(weights, one.gradients), (*beside, *one.stores)) for one in plan.handed)


@lru_cache(maxsize=256)
def _elements(plan: Plan, recompute: Recompute, weights: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """At each moment of the backward the elements of weights' gradients made, of those being made, and of casts."""
    return tuple(
        (_sum(weights, one.gradients), _sum(weights, one.current), _sum(weights, one.casts))
        for one in _backward(plan, recompute)
    )


def _sum(numbers: Sequence[int], places: Places) -> int:
    return sum(map(numbers.__getitem__, places))


class Sizes:
    """A plan's tensors as lines and its weights as numbers, for one batch."""

    def __init__(self, plan: Plan, values: dict[str, Int]) -> None:
        """Take the value of every symbol."""
        self.plan, texts = plan, _texts(plan)
        numbers = [size.value(values) for size in texts.sizes]
        self.element = values["e"]
        self.n_bytes = list(map(numbers.__getitem__, texts.size_of))
        """Of each tensor."""
        self._lines = [
            Line(kind, n_bytes, reason, formula, source, tag)
            for n_bytes, (kind, reason, formula, source, tag) in zip(self.n_bytes, texts.lines, strict=True)
        ]
        self._weights = tuple([int(size.value(values)) for size in plan.weights])

    def lines(self, places: Places) -> tuple[Line, ...]:
        """Write tensors as lines."""
        return tuple(map(self._lines.__getitem__, places))

    def total(self, places: Places) -> Int:
        """Add tensors up. [bytes]"""
        total: Int = sum(map(self.n_bytes.__getitem__, places))
        return total

    def elements(self, places: Places) -> int:
        """Add up elements of weights, which do not depend on the batch."""
        return _sum(self._weights, places)

    def norm(self) -> FinalNorm:
        """Write the plan of a norm outside the blocks."""
        return FinalNorm(self.lines(self.plan.saved), self.points("none"))

    def points(self, recompute: Recompute) -> tuple[BackwardPoint, ...]:
        """Write the moments of the backward."""
        moments, counts = _backward(self.plan, recompute), _elements(self.plan, recompute, self._weights)
        return tuple([self._point(moment, *count) for moment, count in zip(moments, counts, strict=True)])

    def _point(self, moment: Placed, made: int, making: int, copied: int) -> BackwardPoint:
        lines, before = self.lines(moment.stores), self.lines(moment.before)
        return BackwardPoint(moment.name, lines, made, making, copied, place=moment.place, before=before)

    def handed(self, recompute: Recompute) -> tuple[HandedOn, ...]:
        """Write down when gradients come to their weights."""
        return tuple([HandedOn(made, self.lines(stores)) for made, stores in _handed(self.plan, recompute, self._weights)])


def pass_of(sizes: Sizes, *, autocast: bool, recompute: Recompute = "none") -> BlockPass:
    """Write a plan as what one block costs, for one batch."""
    plan = sizes.plan
    given, saved = sizes.lines(plan.given), sizes.lines(plan.saved)
    again: Recompute = "selective" if recompute == "selective" else "full"
    before_experts = plan.forwards[recompute].before_experts
    return BlockPass(
        saved,
        given,
        (*given, *sizes.lines(plan.selective)),
        _top(sizes, "none", autocast=autocast),
        _top(sizes, again, autocast=autocast),
        sizes.points(recompute),
        sizes.elements(plan.casts),
        sizes.lines(plan.input_apart),
        handed=sizes.handed(recompute),
        before_experts=sizes.lines(before_experts),
    )


class Top(NamedTuple):
    """A forward as engines need it: what is there at its end beyond what is kept, and moments that may be above that."""

    last: Places
    end: Places
    """Everything that is there at the end."""
    earlier: tuple[Placed, ...]
    narrow: tuple[Placed, ...] | None
    """Of these those without a tensor that CUDA's autocast alone makes fp32; None where the block has no such tensor."""


@lru_cache(maxsize=256)
def _top_of(plan: Plan, recompute: Recompute) -> Top:
    moments, kept, _ = plan.forwards[recompute]
    *earlier, end = moments
    last = tuple([place for place in end.stores if place not in kept])
    wide = {place for place, store in enumerate(plan.stores) if store.tag.off_gpu is OffGpu.HALF}
    narrow = tuple([moment for moment in earlier if wide.isdisjoint(moment.stores)]) if wide else None
    return Top(last, (*last, *kept), tuple(earlier), narrow)


def _top(sizes: Sizes, recompute: Recompute, *, autocast: bool) -> tuple[Line, ...]:
    """List the last moment's tensors beyond those kept, and by how much an earlier moment is above it.

    Autocast has made fewer casts by an earlier moment, while an engine counts them all.
    """
    plan, top = sizes.plan, _top_of(sizes.plan, recompute)
    at_end, every = sizes.total(top.end), sizes.elements(plan.casts) if autocast else 0

    def above(some: tuple[Placed, ...]) -> Int:
        most: Int = 0
        for moment in some:
            casts = every - sizes.elements(moment.casts) if autocast else 0
            most = maximum(most, sizes.total(moment.stores) - sizes.element * casts - at_end)
        return most

    highest = above(top.earlier)
    plain = highest if top.narrow is None else above(top.narrow)
    excess = Line(Kind.TEMPORARY, plain, EXCESS, source=plan.source)
    if top.narrow is None:
        return (*sizes.lines(top.last), excess)
    return (
        *sizes.lines(top.last),
        excess,
        Line(Kind.TEMPORARY, highest - plain, CUDA_EXCESS, source=plan.source, tag=CUDA_ALONE),
    )
