"""From a family's program to the memory of one block.

:func:`plan_of` runs the program of a structure once and keeps the moments that can be the peak. :class:`Sizes` computes its
tensors' bytes for one batch, or for a column of batches.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

from zeroplan.errors import SpecError
from zeroplan.expr import Size, Values
from zeroplan.ledger import Kind, Line, Module, OffGpu, Tag
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Bool, Int, maximum, where
from zeroplan.spec.family import LATENT_FAMILIES, TRAITS
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import EVEN, LINEAR_KERNELS, ROUNDING, TORCHTITANS, Recompute, WhoseModules
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass, Compute, GradientArrivals, Place, without_input
from zeroplan.transformer.families.attention import WIDEST_OF_FLASH, head_size
from zeroplan.transformer.families.definition import Block, Chunks, Program, Training, definition_of
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.sharded import SHARES, TENSOR_PARALLEL, linear_of_a_rank
from zeroplan.transformer.families.tags import BLOCK_INPUT, CUDA_ALONE, INCOMING
from zeroplan.transformer.families.tape import Alive, Arrival, Store, Tape, Value, with_twins
from zeroplan.transformer.families.widths import (
    Widths,
    grouped_heads,
    in_one_chunk,
    is_masked,
    names_in_formulas,
    one_key_head,
    quantities,
    renamed,
    tracks_all_layers,
    values_of,
)
from zeroplan.transformer.parameters import HANDED, SHARED, WITH_EXPERTS, WITH_STATES, OwnKeys, own_keys, plain_kind
from zeroplan.transformer.symbols import T, T_p, e, h, r


def program_of(family: str) -> Program:
    """Return a family's program, torchtitan's own, or that of a vision tower."""
    if family in TORCHTITANS:
        from zeroplan.transformer.families.torchtitan import PROGRAM, PROGRAM_SINCE_0_3  # noqa: PLC0415  keeps start-up fast

        return PROGRAM if family == "torchtitan" else PROGRAM_SINCE_0_3
    if family == "mllama":
        from zeroplan.transformer.families.mllama import PROGRAM as CROSS  # noqa: PLC0415  as above

        return CROSS
    if family.startswith("vision/"):
        from zeroplan.transformer.families.vision import PROGRAMS  # noqa: PLC0415  keeps start-up fast

        return PROGRAMS[family.removeprefix("vision/")]
    return definition_of(family).program


#: Reasons of lines for the bytes by which an earlier moment of a forward exceeds its last one. The second counts tensors that
#: CUDA's autocast makes in fp32.
EXCESS = "attention, beyond the later peak"
CUDA_EXCESS = "tensors in fp32 under autocast, beyond the later peak, on CUDA"

Stores = tuple[Store, ...]
Elements = tuple[Size, ...]
"""Elements of weights."""


class Forward(NamedTuple):
    """A forward: its moments until its end, its kept tensors, and the tensors alive when the experts begin."""

    moments: tuple[Alive, ...]
    kept: Stores
    before_experts: Stores


class Plan(NamedTuple):
    """The record of one structure's runs, with expressions for sizes."""

    source: str
    forwards: Mapping[Recompute, Forward]
    """Without a checkpoint; and in the checkpoints that a backward may run again."""
    points: tuple[Alive, ...]
    casts: Elements = ()
    """Weights whose autocast copies live to the backward."""
    cached: Elements = ()
    """Weights whose copies live to the end of the forward."""
    selective: Stores = ()
    """Tensors that selective recomputation keeps: every second plain matrix product, and the outputs of attention's kernel."""
    given: Stores = ()
    again: Mapping[Recompute, tuple[Alive, ...]] = {}
    """Moments of a recomputation that may exceed every moment of the backward."""
    arrivals: tuple[Arrival, ...] = ()
    on_host: Stores = ()
    """Copies in host memory of the block's saved tensors."""
    handed: Stores = ()
    """Tensors that layers above read too."""
    arriving: Stores = ()
    """What layers above leave for the backward beside the residual stream's gradient."""
    leaving: Stores = ()
    """The same when the backward is done."""
    others: Stores = ()
    """Other tensors that a caller needs as lines."""
    names: Mapping[str, str] = {}
    """Symbols whose names in formulas differ from those of sizes."""
    split: bool = False
    """It is that of one tensor-parallel rank."""

    def __eq__(self, other: object) -> bool:
        """Whether the other is this very plan: caches keyed on plans must be fast."""
        return self is other

    def __ne__(self, other: object) -> bool:
        """Whether the other is another object."""
        return self is not other

    def __hash__(self) -> int:
        """Return a hash of its identity."""
        return id(self)

    @property
    def saved(self) -> Stores:
        """Tensors that live from the forward to the backward without a checkpoint."""
        return self.forwards["none"].kept

    @property
    def input_apart(self) -> Stores:
        """The block's inputs, unless the block saves them."""
        return tuple([one for one in self.given if one not in self.saved])

    def moments(self) -> Iterator[Alive]:
        """Yield all moments."""
        runs = (*(one.moments for one in self.forwards.values()), self.points, *self.again.values())
        return chain.from_iterable(runs)

    def stores(self) -> Stores:
        """Return all tensors, each once."""
        kept = [some for one in self.forwards.values() for some in (one.kept, one.before_experts)]
        moments = [some for one in self.moments() for some in (one.stores, one.before)]
        beside = (self.selective, self.given, self.on_host, self.handed, self.arriving, self.leaving, self.others)
        return tuple(dict.fromkeys(chain(*kept, *moments, *(one.stores for one in self.arrivals), *beside)))

    def weights(self) -> Elements:
        """Return the elements of all weights, each number once."""
        moments = [some for one in self.moments() for some in (one.gradients, one.current, one.casts)]
        return tuple(dict.fromkeys(chain(*moments, *(one.gradients for one in self.arrivals), self.casts, self.cached)))


def numbered(moments: Iterable[Alive]) -> tuple[Alive, ...]:
    """Return moments with numbers in repeated names."""
    named = Counter[str]()
    found = list[Alive]()
    for one in moments:
        named[one.name] += 1
        times = named[one.name]
        found.append(one if times == 1 else one._replace(name=f"{one.name} ({times})"))
    return tuple(found)


def ran_forward(tape: Tape, kept: Iterable[Store], dtypes: dict[str, bool]) -> Forward:
    """Return the forward that a tape has run."""
    moments = highest(tape.moments, **dtypes)
    end = () if moments[-1] == tape.moments[-1] else tape.moments[-1:]
    return Forward((*moments, *end), tuple(kept), tape.alive_at_forward.get(Module.EXPERTS, ()))


def traced_block(model: ModelSpec, kind: str, compute: Compute, x: Widths, recompute: Recompute) -> BlockPass:
    """Return the memory of one block, by its family's program, on one rank.

    The backward's points include moments of a recomputation that may be higher. A block before the first trained weight has no
    backward and keeps nothing. With recomputation autograd tracks the embedding's output, so even such a block has one.

    A window no longer than the sequence needs a mask (transformers 5.23, masking_utils.py, _ignore_causal_mask_sdpa).
    Linear attention over a single chunk runs no loop, and so has another graph.
    """
    if compute.tp > 1 or compute.cp > 1:
        _refuse_a_window(model, compute, x)
    alike = plain_kind(model, kind)
    if alike in WITH_STATES:
        of_mamba = model.layer_pattern and model.family not in ("minimax", "kimi_linear")
        alone = x.micro_batch == 1  # Mamba-2 copies less of a single sequence of one chunk
        return by_mask(
            in_one_chunk(model, x),
            lambda one: by_mask(
                alone if one and of_mamba else False,
                lambda single: _of(model, kind, compute, x, recompute, masked=one, single=single),
            ),
        )
    made = by_mask(is_masked(model, x, alike), lambda masked: _of(model, kind, compute, x, recompute, masked=masked))
    if kind == "frozen" and compute.recompute == "none":
        return BlockPass((), (), (), made.forward, (), (), 0)
    return made


def _refuse_a_window(model: ModelSpec, compute: Compute, x: Widths) -> None:
    beyond = is_masked(model, x)
    if beyond if isinstance(beyond, bool) else beyond.any():
        ways = f"cp={compute.cp}" if compute.tp == 1 else f"tp={compute.tp}"
        raise SpecError(f"{ways} with a sliding window shorter than the sequence is not modelled; use {ways[:2]}=1")


def torchtitan_block(
    model: ModelSpec, x: Widths, recompute: Recompute, replaced: tuple[str, ...], modules: WhoseModules
) -> BlockPass:
    """Return the memory of one block of torchtitan's Llama 3; fused kernels ``replaced`` some of its parts."""
    plan = plan_of(torchtitan_structure(x, replaced, recompute, modules), run_again=recompute != "none")
    return pass_of(Sizes(plan, quantities(x, model.intermediate_size)), autocast=False, recompute=recompute)


def torchtitan_structure(
    x: Widths, replaced: tuple[str, ...] = (), recompute: Recompute = "none", modules: WhoseModules = "torchtitan"
) -> Block:
    """Return the structure of a block of torchtitan's Llama 3; fused kernels ``replaced`` some of its parts.

    torchtitan compiles a block with its checkpoint, so that the compiler sees the recomputation.
    """
    attention, grouped, one_key = x.attention, x.key != x.query, x.key == x.head_dim
    return Block(
        modules, x.element == 4, False, attention, False, grouped, one_key, False, x.compute.kernels,
        recompute=recompute if "compiled-blocks" in replaced else "none", fused=replaced,
    )  # fmt: skip


def saves_its_input(model: ModelSpec, kind: str, compute: Compute, x: Widths) -> bool:
    """Whether a block that is not recomputed saves its input tensor itself, not a cast copy."""
    return not plan_of(
        structure_of(model, kind, compute._replace(recompute="none"), x, masked=False), run_again=False
    ).input_apart


#: The family whose block the dense layers of a family with experts use.
_DENSE_LAYERS = {"qwen3_moe": "qwen3"}


#: Fused parts outside the blocks.
_ELSEWHERE = ("cross-entropy", "loss-in-pieces", "compiled-loss")


def _of(
    model: ModelSpec, kind: str, compute: Compute, x: Widths, recompute: Recompute, *, masked: bool, single: bool = False
) -> BlockPass:
    structure = structure_of(model, kind, compute, x, masked=masked, single=single)
    values = values_of(model, x, compute.tp if structure.sharded else 1)
    again = recompute if structure.recompute == "none" else structure.recompute
    plan = plan_of(structure, run_again=again != "none")
    return recalled(
        lambda: (pass_of, plan, again, *map(as_key, values.values())),
        lambda: pass_of(Sizes(plan, values), autocast=structure.autocast, recompute=again),
    )


def structure_of(
    model: ModelSpec, kind: str, compute: Compute, x: Widths, *, masked: bool, single: bool = False
) -> Block:  # fmt: skip
    """Return the structure of a model's block of this kind. ``single``: the batch is one sequence, of one chunk."""
    training, kind = training_of(model, kind, compute), plain_kind(model, kind)
    no_experts = kind.startswith("dense") or (TRAITS[model.family].one_module and kind not in WITH_EXPERTS)
    dense = model.moe is None or no_experts
    sharded = compute.tp > 1
    compiled = "compiled-blocks" in compute.fused and compute.recompute == "selective"
    apart = training is not None or sharded or (dense and compute.cp > 1) or compiled
    block = Block(
        _DENSE_LAYERS.get(model.family, model.family) if dense else model.family,
        x.element == 4,
        x.autocast if training is None else compute.autocast and not training.wide_adapters,
        x.attention,
        masked if kind not in WITH_STATES else not kind.endswith("linear") and compute.padded and x.attention == "sdpa",
        grouped_heads(model, x, kind),
        one_key_head(model, x, kind),
        model.attention_bias,
        compute.kernels,
        model.parallel_residual,
        model.activation,
        model.attention_bias and TRAITS[model.family].biased_output,
        model.mlp_bias,
        ring=compute.cp,
        routed=not dense,
        casts_inputs=compute.casts_inputs,
        training=training,
        sharded=sharded,
        whole_sequences=compute.whole_sequences,
        recompute=compute.recompute if apart else "none",
        chunks="single" if single else _chunks(kind, one=masked),
        release=compute.release._replace(wide_logits=False, shifts_logits=False, reentrant=False, wide_routers=False),
        is_fp16=compute.is_fp16,
        fused=tuple(one for one in compute.fused if one not in _ELSEWHERE and (one != LINEAR_KERNELS or kind in WITH_STATES)),
        offloaded=compute.offloaded and compute.recompute == "none",
    )
    return _with_experts(_with_heads(_with_images(block, model, kind, compute), model, kind, x, compute), model, kind, compute)


def _with_images(block: Block, model: ModelSpec, kind: str, compute: Compute) -> Block:
    """Return the structure of a layer of this kind: one that attends to images if ``kind`` is such a layer."""
    vision = model.vision
    if kind != "cross" or vision is None:
        return block
    frozen = model.adapter is not None or (vision.freeze_tower and vision.freeze_projector)
    followed = not frozen or model.adapts_tower or (compute.recompute != "none" and vision.runs_again_frozen)
    return block._replace(family="mllama", crosses="followed" if followed else "constant")


def _with_heads(block: Block, model: ModelSpec, kind: str, x: Widths, compute: Compute) -> Block:
    """Return the structure with that of its heads."""
    mla, without_rotary = model.mla, kind == "global" and TRAITS[model.family].global_without_rotary
    return block._replace(
        head_size=head_size(max(x.head_dim, x.context // x.heads)),
        compressed=mla is not None and mla.q_lora_rank is not None,
        one_size=mla is not None and x.context == x.query,
        alone=model.family == "bloom" and model.num_hidden_layers == 1,
        head_norms=model.head_norms,
        without_rotary=not model.rotary or without_rotary,
        filled=compute.kernels == "cuda" and x.element == 2 and x.head_dim % 8 != 0,
        keys_are_values=kind == "global" and model.global_head_dim > 0 and model.per_layer is None,
        own=_own_keys(model, kind, compute),
        heads=kind.partition("_")[0] if model.global_head_dim else "",  # type: ignore[arg-type]  # local or global
        padded=compute.padded and (x.attention == "flash" or kind.endswith("short") or kind in WITH_STATES),
        short=kind.endswith("short"),
        borrows_keys=kind in (HANDED, SHARED),
        keys_kept_below=mla is not None and mla.index_every > 1 and kind in ("moe", SHARED),
        too_wide=mla is None and x.head_dim > WIDEST_OF_FLASH,
    )


def _own_keys(model: ModelSpec, kind: str, compute: Compute) -> OwnKeys | None:
    if model.per_layer is None:
        return None
    own = own_keys(kind, shares=model.per_layer.shared_layers > 0)
    return own._replace(weights_too=compute.keeps_inputs and bool(own.left))


def _with_experts(block: Block, model: ModelSpec, kind: str, compute: Compute) -> Block:
    """Return the structure with that of its experts, or of the one module that it consists of."""
    moe = model.moe
    return block._replace(
        dispatched=compute.expert_ranks > 1,
        latent_experts=moe is not None and moe.latent_size > 0,
        grouped_experts=moe is not None and moe.num_groups > 0,
        uneven=compute.expert_ranks > 1 and compute.imbalance != EVEN,
        looped=moe.num_experts if moe is not None and block.release.loops_over_experts else 0,
        is_mlp=kind == "mlp",
        ahead=kind.endswith("ahead"),
        only_gated=kind == "beside",
        shares=moe is not None and moe.num_shared_experts > 0,
    )


def _chunks(kind: str, *, one: bool) -> Chunks:
    if kind not in WITH_STATES:
        return "none"
    return "one" if one else "several"


def training_of(model: ModelSpec, kind: str, compute: Compute) -> Training | None:
    """Return how a block is trained; None if all of it is trained and autograd tracks its input.

    With recomputation autograd tracks the embedding's output: transformers 5.23, modeling_utils.py,
    ``_activation_checkpointing_enable``.
    """
    recomputed, adapter = compute.recompute != "none", model.adapter
    apart = model.vision is not None and model.vision.freeze_text and kind != "cross"
    if apart and adapter is None:  # gradients reach embeddings of new tokens: torchtune 0.7, FusionEmbedding
        return Training("frozen", tracked=True, keeps_inputs=compute.keeps_inputs)
    if adapter is not None:
        tracked = kind != "first" or (recomputed and not adapter.runs)  # prime-rl wraps blocks in checkpoints itself
        narrow = kind == "first" and model.upcasts_norms and not model.upcasts_ends
        return Training(
            "adapted", tracked, compute.keeps_inputs, () if apart else model.linear_layers_adapted, model.stacked, adapter.quantize,
            adapter.quantize_experts, upcast=model.upcasts_norms, copied=compute.autocast and adapter.base == "fp32",
            dropout=adapter.dropout, narrow=narrow, four_bits_keep_inputs=adapter.four_bits_keep_inputs,
            four_bits_follow_inputs=adapter.four_bits_follow_inputs, wide_adapters=adapter.compute == "fp32",
            fused=next((one for one in ("lora", "axolotl-lora") if one in compute.fused), ""), runs=adapter.runs,
            looped=adapter.looped, dora=adapter.dora,
            all_layers_tracked=tracks_all_layers(model, recomputed),
        )  # fmt: skip
    if model.frozen is None:
        return None
    if kind in ("frozen", "through"):
        return Training("frozen", kind == "through" or recomputed, compute.keeps_inputs)
    return Training("trained", tracked=False) if kind == "first" and not recomputed else None


def by_mask(is_masked: Bool, one: Callable[[bool], BlockPass]) -> BlockPass:
    """Return ``one`` with or without a mask; for a column of batches that differ in this, both in one."""
    return one(is_masked) if isinstance(is_masked, bool) else _either(is_masked, one(True), one(False))


def _either(condition: Bool, yes: BlockPass, no: BlockPass) -> BlockPass:
    """Return the lines of both passes for a column of batches; for each batch the lines of one pass are 0 bytes."""
    made: dict[int, Line] = {}  # a tensor that is alive at several points stays one line

    def where_so(line: Line) -> Line:
        return made.setdefault(id(line), line._replace(n_bytes=where(condition, line.n_bytes, 0)))

    def where_not(line: Line) -> Line:
        return made.setdefault(id(line), line._replace(n_bytes=where(condition, 0, line.n_bytes)))

    first, second = yes.with_lines(where_so), no.with_lines(where_not)
    both: dict[str, Any] = {name: (*getattr(first, name), *getattr(second, name)) for name in (*_OF_EITHER, "points")}
    handed = [one._replace(lines=(*one.lines, *two.lines)) for one, two in zip(first.handed, second.handed, strict=True)]
    return yes._replace(handed=tuple(handed), **both)


#: The lines of a pass that depend on whether there is a mask.
_OF_EITHER = ("saved", "selective", "forward", "forward_recompute", "on_host", "before_experts", "named", "leaving")


@lru_cache(maxsize=256)
def plan_of(structure: Block, *, run_again: bool) -> Plan:
    """Run a structure's program. ``run_again``: a checkpoint's backward runs the forward again, and may peak there.

    A structure with a recomputation has no other; other structures serve both.
    """
    checkpoints: tuple[Recompute, ...] = ("full", "selective") if structure.recompute == "none" else (structure.recompute,)
    keeps = structure.made_on_demand and structure.recompute == "selective"
    ran = run_forward(structure, saving=True, recomputed=run_again, keeps_selected=keeps, brief=True)
    plan = _plan_of(structure, *ran, checkpoints if run_again else ())
    return of_a_rank(plan, whole=structure.whole_sequences) if structure.sharded else plan


def _plan_of(structure: Block, tape: Tape, given: Value, output: Value, checkpoints: tuple[Recompute, ...]) -> Plan:
    """Run the backward of a program that has run forward, and its forwards in checkpoints."""
    dtypes = {"wide": structure.wide, "autocast": structure.autocast, "latent": structure.family in LATENT_FAMILIES}
    plain = ran_forward(tape, (given.store, *tape.history.in_nodes) if structure.offloaded else tape.saved, dtypes)
    casts, cached = tuple(tape.casts), tuple(tape.cached)
    ran = _run_backward(tape, structure, given, output, checkpoints)
    by_place = structure.training is not None and structure.training.keeps_inputs
    points = _highest_at(tape.moments, dtypes, by_place=by_place)
    above = partial(_above_the_backward, tape, given=given.store, dtypes=dtypes, by_place=by_place)

    def forward(*, keeping: bool) -> Forward:
        again = run_forward(structure, saving=False, given=given.store, keeps_selected=keeping, brief=True)[0]
        handed = with_twins(again.history.handed)
        kept = (*again.checkpoint_of(given.store), *handed, *(again.selected.stores() if keeping else ()))
        return ran_forward(again, kept, dtypes)

    arriving, leaving = _beside_the_stream(tape)
    return Plan(
        program_of(structure.family).source,
        {"none": plain, **{one: forward(keeping=one == "selective") for one in checkpoints}},
        numbered(points),
        casts,
        cached,
        selective=tape.selected.stores(),
        given=tape.checkpoint_of(given.store),
        again={recompute: numbered(above(moments)) for recompute, moments in ran.items()},
        arrivals=tuple(tape.gradients.arrivals),
        on_host=() if tape.host is None else tuple(tape.host.copies),
        handed=with_twins(tape.history.handed),
        arriving=arriving,
        leaving=leaving,
        names=names_in_formulas(structure.heads, wide_mlp=structure.own is not None and structure.own.keys == "shared"),
    )


def _beside_the_stream(tape: Tape) -> tuple[tuple[Store, ...], tuple[Store, ...]]:
    """Return what is alive before and after the backward beside the gradient of the residual stream."""
    before = (*tape.arriving.values(), *tape.left)
    return before, tuple([one for one in tape.history.leaving if one is not tape.history.outgoing])


def _run_backward(
    tape: Tape, structure: Block, given: Value, output: Value, checkpoints: tuple[Recompute, ...]
) -> dict[Recompute, list[Alive]]:  # fmt: skip
    """Run the backward on a tape; return the forward's moments as those of each recomputation."""
    tape.release(output, given)
    tape.drop(*(one for one in tape.history.input_copies if structure.offloaded or one not in tape.saved))
    incoming = incoming_of(output, structure)
    whole, until_saved = tape.moments.copy(), tape.moments_until_last_saved()
    tape.run_backward(output, incoming)
    if structure.made_on_demand:
        return {}
    if structure.recompute != "none" and structure.training is None:
        tape.moments[: tape.history.moments_before_rerun] = _not_run_again_yet(tape, given.store, structure.recompute)
    return {
        one: _run_again(until_saved) if one == "full" else _with_kept(_run_again(whole), tape) for one in checkpoints
    }  # fmt: skip


def incoming_of(output: Value, structure: Block) -> Store:
    """Return the gradient of a block's output."""
    source, size = program_of(structure.family).source, r * output.shape
    return Store(Kind.ACTIVATION_GRADIENTS, "gradient of the residual stream", size, source, INCOMING)


def of_a_rank(plan: Plan, *, whole: bool) -> Plan:
    """Return the plan of one tensor-parallel rank: its share of every split width. ``whole``: it has all tokens."""
    shares = SHARES | ({T_p.text: T} if whole else {})
    for store in plan.stores():
        store.size = store.size.replacing(shares)
    return plan._replace(split=True)


def _run_again(moments: list[Alive]) -> list[Alive]:
    """Return moments of the forward as those of a recomputation, each in the module that allocated last."""
    return [
        one._replace(name=f"recomputed: {one.stores[-1].reason}", place=Place(At.RUN_AGAIN, one.stores[-1].tag.module))
        for one in moments
        if one.stores
    ]


def _with_kept(moments: list[Alive], tape: Tape) -> list[Alive]:
    """Return moments of a recomputation with the selected outputs alive from the beginning, since the forward kept them."""
    first = {store: at for at, moment in reversed(list(enumerate(moments))) for store in moment.stores}
    kept = tape.selected.stores()
    return [
        moment._replace(stores=(*moment.stores, *(store for store in kept if first.get(store, 0) > at)))
        for at, moment in enumerate(moments)
    ]


def _highest_at(moments: list[Alive], dtypes: dict[str, bool], *, by_place: bool) -> tuple[Alive, ...]:
    """Return the moments that can be the peak. ``by_place``: per place, for engines that add different bytes per place.

    DeepSpeed's stage 3 needs the place, since frozen weights have no gradients that locate its gathers.
    """
    if not by_place:
        return highest(moments, **dtypes)
    found = {
        place: highest([one for one in moments if one.place == place], **dtypes) for place in {one.place for one in moments}
    }
    return tuple([one for one in moments if any(one is other for other in found[one.place])])


def _above_the_backward(
    tape: Tape, moments: list[Alive], given: Store, dtypes: dict[str, bool], *, by_place: bool
) -> list[Alive]:  # fmt: skip
    """Return the moments of a recomputation, with the waiting gradients, that no backward moment exceeds.

    The checkpoint holds the block's input, unless the block saves it; it counts separately. Nodes of the forward hold their
    tensors while the recomputation makes them again.
    """
    held = [Store(one.kind, one.reason, one.size, one.source, one.tag) for one in tape.history.in_nodes]
    beside = [
        one._replace(
            stores=(
                *(store for store in one.stores if store not in (given, *tape.history.input_copies) or store in tape.saved),
                *tape.history.waiting_at_rerun,
                *held,
            )
        )
        for one in moments
    ]
    return [one for one in _highest_at([*tape.moments, *beside], dtypes, by_place=by_place) if one in beside]


def _not_run_again_yet(tape: Tape, given: Store, recompute: Recompute) -> list[Alive]:
    """Return the backward's moments before the recomputation, with only the checkpoint's kept tensors among the saved ones."""
    kept, stays = tape.selected.stores() if recompute == "selective" else (), (given, *tape.history.in_nodes)
    return [
        one._replace(stores=(*(store for store in one.stores if store in stays or store not in tape.saved), *kept))
        for one in tape.moments[: tape.history.moments_before_rerun]
    ]


def run_forward(
    structure: Block, *, saving: bool, given: Store | None = None, keeps_selected: bool = False, recomputed: bool = False,
    marking: bool = False, brief: bool = False,
) -> tuple[Tape, Value, Value]:  # fmt: skip
    """Run the program forward. Return tape, input and output. ``given``: the input of another run, to use again."""
    program, training = program_of(structure.family), structure.training
    tape = Tape(
        wide=structure.wide,
        autocast=structure.autocast,
        saving=saving,
        narrow=training is not None and not training.wide_residual,
        keeps_selected=keeps_selected,
        recomputed=recomputed,
        marking=marking,
        fused_softmax=structure.is_fp16,
        offloading=structure.offloaded and saving,
        on_demand=structure.made_on_demand,
        brief=brief,
    )
    dtype = e if training is not None and training.narrow else r
    value = _block_input(tape, given, T_p * h if structure.sharded else T * h, dtype, program.source)
    if training is not None:
        from zeroplan.transformer.families.frozen import freeze  # noqa: PLC0415  keeps start-up fast

        freeze(tape, value, training)
    _set_mode(tape, structure)
    made = program.block(tape, value, structure)
    if structure.made_on_demand:
        tape.forget_last_product()
    return tape, value, made


def _set_mode(tape: Tape, structure: Block) -> None:
    """Set how the block's layers run: split over ranks, in float8, or by fused kernels."""
    if structure.sharded and tape.mode.linear is not None:
        tape.mode = tape.mode._replace(linear=partial(linear_of_a_rank, run=tape.mode.linear), sharded=True)
    elif structure.sharded:
        tape.mode = TENSOR_PARALLEL
    if recipes := [name.removeprefix("float8-") for name in structure.fused if name.startswith("float8-")]:
        from zeroplan.transformer.families.float8 import mode_of  # noqa: PLC0415  keeps start-up fast

        tape.mode = mode_of(recipes[0])
    for name in [one for one in ROUNDING if one in structure.fused]:
        from zeroplan.transformer.families.fake_quantised import mode_of as rounding  # noqa: PLC0415  as above

        tape.mode = rounding(tape.mode, structure.training, name)
    if "compiled-blocks" in structure.fused:
        from zeroplan.transformer.families.compiled import COMPILED_BLOCK, in_float8  # noqa: PLC0415  as above

        tape.mode = in_float8(recipes[0]) if recipes else COMPILED_BLOCK
    tape.mode = tape.mode._replace(
        uneven=structure.uneven, latent_experts=structure.latent_experts, expert_by_expert=structure.kernels == "cuda-7",
        fused=structure.fused,
    )  # fmt: skip
    if "te-float8" in structure.fused:
        from zeroplan.transformer.families.te_float8 import mode_of as in_te_float8  # noqa: PLC0415  as above

        tape.mode = in_te_float8(tape.mode)


def _block_input(tape: Tape, given: Store | None, shape: Size, dtype: Size, source: str) -> Value:
    """Return the block's input: that of another run, or a new tensor."""
    if given is None:
        return Value(tape.make(Kind.ACTIVATIONS, "block input", dtype * shape, source, BLOCK_INPUT), dtype, shape)
    given.holds = 1
    tape.alive[given] = None
    return Value(given, dtype, shape)


class Texts(NamedTuple):
    """The parts of a plan's lines that are the same for every batch."""

    stores: Stores
    weights: Elements
    sizes: Elements
    """The sizes of all tensors, each once."""
    size_of: tuple[int, ...]
    """The index of each tensor's size."""
    kinds: tuple[Kind, ...]
    words: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[Tag, ...]]
    """Reasons, formulas, sources and tags of all tensors."""


@lru_cache(maxsize=256)
def _texts(plan: Plan, owner: str) -> Texts:
    stores = plan.stores()
    places: dict[Size, int] = {}
    size_of = tuple([places.setdefault(store.size, len(places)) for store in stores])
    words = (
        tuple([f"{owner}{store.reason}" for store in stores]),
        tuple(["" if owner else renamed(store.size.text, plan.names) for store in stores]),
        tuple([store.source for store in stores]),
        tuple([store.tag for store in stores]),
    )
    return Texts(stores, plan.weights(), tuple(places), size_of, tuple([store.kind for store in stores]), words)


_Pick: TypeAlias = Callable[[Sequence[Line]], tuple[Line, ...]]
"""Returns some of all lines of a plan."""


class _Backward(NamedTuple):
    """The parts of a backward that are the same for every batch. A moment's parts are at the same index of each."""

    names: tuple[str, ...]
    lines: tuple[_Pick, ...]
    elements: tuple[tuple[int, ...], ...]
    """Elements of weight gradients made, of those being made, and of casts."""
    places: tuple[Place, ...]
    before: tuple[_Pick, ...]
    """Empty if no moment has any."""
    arrived: tuple[int, ...]
    """Elements of gradients so far at each arrival of weight gradients."""
    at_arrival: tuple[_Pick, ...]


@lru_cache(maxsize=256)
def _backward(plan: Plan, recompute: Recompute, weights: tuple[int, ...]) -> _Backward:
    """Return the moments of the backward, including those of the recomputation, and the arrivals of weight gradients."""
    stores, every, *_ = _texts(plan, "")
    numbers = dict(zip([size.text for size in every], weights, strict=True))
    index = dict(zip(stores, range(len(stores)), strict=True))
    beside = () if recompute == "none" else plan.input_apart
    moments = (*plan.again.get(recompute, ()), *plan.points)

    def pick(some: Stores) -> _Pick:
        at = [index[one] for one in some]
        return itemgetter(*at) if len(at) > 1 else lambda lines: tuple([lines[one] for one in at])

    each = [[_sum(numbers, some) for some in map(attrgetter(name), moments)] for name in ("gradients", "current", "casts")]
    return _Backward(
        tuple([one.name for one in moments]),
        tuple([pick(one.stores) for one in moments]),
        tuple(map(tuple, each)),
        tuple([one.place for one in moments]),
        tuple([pick(one.before) for one in moments]) if any(one.before for one in moments) else (),
        tuple([_sum(numbers, one.gradients) for one in plan.arrivals]),
        tuple([pick((*beside, *one.stores)) for one in plan.arrivals]),
    )


def _sum(numbers: Mapping[str, int], sizes: Elements) -> int:
    """Return the sum of weights, whose ``numbers`` are by text: that of a size takes a call."""
    return sum([numbers[one.text] for one in sizes])


#: Each makes a tuple of its fields in their order. Faster than keywords, for hundreds of them.
_line: Callable[[Iterable[object]], Line] = partial(tuple.__new__, Line)
_point: Callable[[Iterable[object]], BackwardPoint] = partial(tuple.__new__, BackwardPoint)
_arrival: Callable[[Iterable[object]], GradientArrivals] = partial(tuple.__new__, GradientArrivals)


class Sizes:
    """A plan's tensors as lines and its weights as numbers, for one batch."""

    def __init__(self, plan: Plan, values: Values, owner: str = "") -> None:
        """``values``: the value of every symbol; ``owner``: the beginning of all reasons, if formulas have no symbols for it."""
        self.plan, self.owner, texts = plan, owner, _texts(plan, owner)
        numbers = [size.value(values) for size in texts.sizes]
        self.element = values["e"]
        n_bytes = list(map(numbers.__getitem__, texts.size_of))
        self._n_bytes = dict(zip(texts.stores, n_bytes, strict=True))
        self._every = list(map(_line, zip(texts.kinds, n_bytes, *texts.words, strict=True)))
        self._lines = dict(zip(texts.stores, self._every, strict=True))
        own = values if not plan.split else {**values, **{name: share.value(values) for name, share in SHARES.items()}}
        self._weights = tuple([int(size.value(own)) for size in texts.weights])
        self._elements = dict(zip([size.text for size in texts.weights], self._weights, strict=True))

    def lines(self, stores: Stores) -> tuple[Line, ...]:
        """Return tensors as lines."""
        return tuple(map(self._lines.__getitem__, stores))

    def total(self, stores: Stores) -> Int:
        """Return the sum of tensors. [bytes]"""
        total: Int = sum(map(self._n_bytes.__getitem__, stores))
        return total

    def elements(self, sizes: Elements) -> int:
        """Return the sum of weights, which does not depend on the batch. [elements]"""
        return _sum(self._elements, sizes)

    def points(self, recompute: Recompute) -> tuple[BackwardPoint, ...]:
        """Return the moments of the backward."""
        of, every = _backward(self.plan, recompute, self._weights), self._every
        lines, before = [one(every) for one in of.lines], [one(every) for one in of.before] or repeat(())
        return tuple(map(_point, zip(of.names, lines, *of.elements, repeat(()), of.places, before)))

    def handed(self, recompute: Recompute) -> tuple[GradientArrivals, ...]:
        """Return the arrivals of weight gradients, with the live tensors."""
        of, every = _backward(self.plan, recompute, self._weights), self._every
        return tuple(map(_arrival, zip(of.arrived, [one(every) for one in of.at_arrival], strict=True)))


def pass_of(sizes: Sizes, *, autocast: bool, recompute: Recompute = "none") -> BlockPass:
    """Return the memory of one block, for one batch."""
    plan = sizes.plan
    given, saved = sizes.lines(plan.given), sizes.lines(plan.saved)
    before_experts = plan.forwards[recompute].before_experts
    on_host, handed = sizes.lines(plan.on_host), sizes.lines(plan.handed)
    return BlockPass(
        without_input(saved) if on_host else saved,
        (*given, *handed),
        (*given, *handed, *sizes.lines(plan.selective)),
        top(sizes, "none", autocast=autocast),
        () if recompute == "none" else top(sizes, recompute, autocast=autocast),
        sizes.points(recompute),
        sizes.elements(plan.casts),
        sizes.lines(plan.input_apart),
        on_host=on_host,
        handed=sizes.handed(recompute),
        before_experts=sizes.lines(before_experts),
        named=() if recompute != "none" else sizes.lines(tuple([one for one in plan.handed if one not in plan.saved])),
        arriving=sizes.lines(plan.arriving),
        leaving=sizes.lines(plan.leaving),
    )


class Top(NamedTuple):
    """A forward as engines need it: the unkept tensors alive at its end, and moments that may be higher."""

    last: Stores
    end: Stores
    """All tensors alive at the end."""
    earlier: tuple[Alive, ...]
    narrow: tuple[Alive, ...] | None
    """The earlier moments without tensors that only CUDA's autocast makes in fp32; None if the block has no such tensor."""


@lru_cache(maxsize=256)
def _top_of(plan: Plan, recompute: Recompute) -> Top:
    moments, kept, _ = plan.forwards[recompute]
    *earlier, end = moments
    last = tuple([store for store in end.stores if store not in kept])
    wide = {store for store in _texts(plan, "").stores if store.tag.off_gpu is OffGpu.HALF}
    narrow = tuple([moment for moment in earlier if wide.isdisjoint(moment.stores)]) if wide else None
    return Top(last, (*last, *kept), tuple(earlier), narrow)


class Within(NamedTuple):
    """Moments of a forward, and the extra bytes alive then."""

    moments: tuple[Alive, ...]
    n_bytes: Int


NOTHING_BESIDE = Within((), 0)


def top(
    sizes: Sizes, recompute: Recompute, *, autocast: bool, above: str = EXCESS, within: Within = NOTHING_BESIDE
) -> tuple[Line, ...]:
    """Return the last moment's tensors beyond those kept, and a line of the bytes by which an earlier moment is higher.

    By an earlier moment autocast has made fewer casts; engines count all of them. ``above``: the reason of the last line.
    ``within``: earlier moments with more beside them.
    """
    plan, top = sizes.plan, _top_of(sizes.plan, recompute)
    at_end, every = sizes.total(top.end), sizes.elements((*plan.casts, *plan.cached)) if autocast else 0

    def beyond_end(moment: Alive) -> Int:
        casts = every - sizes.elements(moment.casts) if autocast else 0
        return sizes.total(moment.stores) - sizes.element * casts - at_end

    def excess_of(some: tuple[Alive, ...]) -> Int:
        return maximum(0, *map(beyond_end, some), *[beyond_end(moment) + within.n_bytes for moment in within.moments])

    highest = excess_of(top.earlier)
    plain = highest if top.narrow is None else excess_of(top.narrow)
    excess = Line(Kind.TEMPORARY, plain, f"{sizes.owner}{above}", source=plan.source)
    if top.narrow is None:
        return (*sizes.lines(top.last), excess)
    return (
        *sizes.lines(top.last),
        excess,
        Line(Kind.TEMPORARY, highest - plain, f"{sizes.owner}{CUDA_EXCESS}", source=plan.source, tag=CUDA_ALONE),
    )
