"""Draws random blocks of every family, runs them on the fake GPU, and compares the estimate with the run to the byte.

``python -m tests.transformer.drawn_blocks llama,qwen2 --cases 300`` prints a line for every block that differs.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch

from tests.transformer.fake_blocks import BlockRun, Passage, passed
from zeroplan.catalog.config_rest import config_keys
from zeroplan.catalog.gpu import gpu
from zeroplan.engines.quantised import is_bias
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.family import (
    DENSE_LAYERS,
    FAMILIES,
    FILLING_HEADS,
    FREE_ACTIVATION,
    GLOBAL_LAYERS,
    LATENT_FAMILIES,
    LINEAR_FAMILIES,
    MOE_FAMILIES,
    ONE_WIDTH_FAMILIES,
    PATTERNED,
    PLAIN_HEADS,
    SHARED_EXPERTS,
    SOME_WINDOWED,
    TRAITS,
    WINDOWED_FAMILIES,
)
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.spec.model import LinearSpec, MlaSpec, ModelSpec, MoeSpec, lightning
from zeroplan.spec.recipe import LINEAR_KERNELS, RecipeSpec
from zeroplan.spec.releases import release_of
from zeroplan.spec.traits import Activation
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.families.tags import SCRATCH
from zeroplan.transformer.parameters import HANDED, SHARED, kinds_by_indexer
from zeroplan.transformer.params import layout, runs_in_order
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
from zeroplan.verify.fake_cuda.installed import CUDA, install_node
from zeroplan.verify.release import installed_transformers
from zeroplan.verify.training.activations_away import offload_blocks, offloading_from
from zeroplan.verify.training.causal_model import causal_module
from zeroplan.verify.training.modules import find_blocks
from zeroplan.verify.training.workload import mask_of_padding
from zeroplan.verify.watching.timeline import Timeline
from zeroplan.verify.watching.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zeroplan.ledger import Line
    from zeroplan.transformer.parameters import BlockRun as LayerRun

RANDOM_STATE = 24
"""Seed and offset that CUDA's attention kernels save, of 8 bytes, or 16 and 8; the estimate leaves them out."""
BY_KINDS = (
    "llama4_text",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "olmo3",
    "cohere2",
    "cwm",
    "exaone_moe",
)
"""Families whose classes always have a window."""

_PATTERNS = {
    "llama4_text": ("LLG", "LDG", "DGL"), "kimi_linear": ("mM*", "M*M", "mDM", "DmM", "*MM"),
    "exaone_moe": ("LLG", "DDG", "DGL", "DLG"),
    "lfm2": ("*CC", "**C", "*C*"), "lfm2_moe": ("DC*", "D*C", "Dc*", "DDC"),
}  # fmt: skip


class Case(NamedTuple):
    """A model, its compute settings, its batch, and the index of the block that is measured."""

    spec: ModelSpec
    compute: Compute
    size: BatchSpec
    block: int

    @property
    def layers(self) -> LayerRun:
        """The run of blocks that contains the block."""
        return layout(self.spec).runs[runs_in_order(self.spec)[self.block]]


# --- drawing --------------------------------------------------------------------------------------------------------------


def drawn(draw: Random, family: str) -> Case:
    """Draw a block with widths as in published models: at least two heads, and at least two experts per token."""
    spec, block = _model(draw, family)
    autocast = draw.random() < 0.3
    element, attention = 2 if autocast else draw.choice((2, 2, 4)), draw.choice(("sdpa", "sdpa", "eager"))
    recompute = draw.choice(("none", "none", "full", "full", "selective"))
    compute = Compute(element, autocast=autocast, attention=attention, recompute=recompute)
    micro, tokens = draw.choice((1, 1, 2, 3, 4)), draw.choice((16, 31, 32, 64, 65, 96, 100, 128, 200, 256))
    return Case(spec, compute, BatchSpec(micro_batch_size=micro, seq_len=tokens), block)


def with_padding(draw: Random, family: str) -> Case:
    """Return the same case with padding in the batch, so that attention gets a mask."""
    case = drawn(draw, family)
    return case._replace(compute=case.compute._replace(padded=True, attention="sdpa"))


def on_an_old_gpu(draw: Random, family: str) -> Case:
    """Return the same case on a GPU before compute capability 8.0, where torch has few kernels; autocast may use fp16."""
    case = drawn(draw, family)
    is_fp16 = case.compute.autocast and draw.random() < 0.5
    return case._replace(compute=case.compute._replace(kernels="cuda-7", attention="sdpa", is_fp16=is_fp16))


def _sizes(draw: Random, family: str) -> tuple[int, int, int, int, int]:
    """Draw heads, their width, key/value heads, hidden width and MLP width."""
    plain, heads = family in PLAIN_HEADS, draw.choice((2, 2, 3, 4, 6, 8))
    head_dim = draw.choice((8, 16, 24, 32, 64, 80, 128, draw.choice((136, 160, 256))))
    head_dim += TRAITS[family].rotary_width
    kv_heads = heads if plain else draw.choice([number for number in (1, 2, 3, 4, 6, 8) if heads % number == 0])
    part = 1 if plain else draw.choice((0.5, 0.75, 1, 1, 1.25, 2))
    kv_heads = 1 if family == "falcon" and kv_heads == heads else kv_heads
    hidden = (
        heads * head_dim if family in FILLING_HEADS else max(8 * heads, int(part * heads * head_dim) // (8 * heads) * 8 * heads)
    )
    wide = max(hidden, heads * head_dim)
    ffn = 4 * hidden if family == "bloom" else int(wide * draw.choice((1, 1.5, 2, 2.6875, 3.5, 5))) // 8 * 8
    return heads, head_dim, kv_heads, hidden, ffn


def _pattern(draw: Random, family: str) -> str:
    """Draw the kinds of the layers."""
    if TRAITS[family].one_kind:
        return draw.choice(("H", "N"))
    if family in _PATTERNS:
        return draw.choice(_PATTERNS[family])
    return draw.choice(("*M*", "*-M", "M*M", "-EM") if TRAITS[family].one_module else ("*M*", "*MM", "**M"))


def _model(draw: Random, family: str) -> tuple[ModelSpec, int]:
    heads, head_dim, kv_heads, hidden, ffn = _sizes(draw, family)
    mla = _latent(draw, indexed=TRAITS[family].indexed) if family in LATENT_FAMILIES else None
    every, patterned = GLOBAL_LAYERS.get(family), family in PATTERNED
    own_tables = family in LINEAR_FAMILIES or TRAITS[family].angles_of_kinds  # which go with the first layer that reads them
    block = 1 if every is None else draw.choice((1, 2 * every - 1 if own_tables else every - 1 + TRAITS[family].global_first))
    state_space = _state_space(draw, family, heads, head_dim, hidden) if patterned and family in LINEAR_FAMILIES else None
    of_one_module = TRAITS[family].one_module
    pattern = _pattern(draw, family) if patterned else ""
    routed = (
        "E" in pattern if of_one_module else family in MOE_FAMILIES and not (TRAITS[family].may_be_dense and draw.randint(0, 1))
    )
    window = _window(draw, family)
    spec = ModelSpec(
        family=family,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=max(block + 2, every or 0) if family != "gemma4_text" else 18,
        num_attention_heads=heads,
        num_key_value_heads=heads if mla is not None else kv_heads,
        head_dim=head_dim if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        vocab_size=104,
        max_position_embeddings=512,
        positions={"gpt2": 512, "opt": 514}.get(family, 0),
        tie_word_embeddings=family == "gpt2",
        sliding_window=window,
        max_window_layers=block + draw.randint(0, 1) if family in SOME_WINDOWED and window is not None else 0,
        moe=_experts(draw, family, ffn) if routed else None,
        mla=mla,
        linear=state_space or (_linear(draw) if family in LINEAR_FAMILIES else None),
        layer_pattern=pattern,
        rotary=not TRAITS[family].rotary_optional or (not of_one_module and bool(draw.randint(0, 1))),
        hidden_act=draw.choice(get_args(Activation)) if family in FREE_ACTIVATION and draw.randint(0, 2) == 0 else None,
        parallel_residual=family != "gpt_neox" or bool(draw.randint(0, 1)),
        use_qk_norm=TRAITS[family].head_norms is None and bool(draw.randint(0, 1)),
        **_biases(draw, family),
        **(_global_heads(draw, heads) if family == "gemma4_text" else {}),
    )
    return spec, block


def _global_heads(draw: Random, heads: int) -> dict[str, int]:
    kv_heads = draw.choice([number for number in (1, 2, 3, 4, 6, 8) if heads % number == 0])
    return {"global_head_dim": draw.choice((16, 32, 64, 128, 264, 512)), "global_key_value_heads": kv_heads}


def _biases(draw: Random, family: str) -> dict[str, bool]:
    always = family in (*PLAIN_HEADS, "qwen2", "gpt_oss", "starcoder2")
    fixed = config_keys(family).fixed
    free = "attention_bias" not in fixed and bool(draw.randint(0, 1))
    attention = free if family in ("gpt_neox", "qwen2_moe") else always or free
    mlp = family in (*PLAIN_HEADS, "starcoder2") or ("mlp_bias" not in fixed and draw.randint(0, 3) == 0)
    attention = mlp if family == "internlm3" else attention  # one key has both
    return {"attention_bias": attention, "mlp_bias": mlp}


def _window(draw: Random, family: str) -> int | None:
    if family not in WINDOWED_FAMILIES:
        return None
    return draw.choice((31, 64, 100, 4096) if family in BY_KINDS else (None, 31, 64, 4096))


def _experts(draw: Random, family: str, ffn: int) -> MoeSpec:
    experts = draw.choice((2, 4, 6, 8, 16))
    return MoeSpec(
        num_experts=experts,
        num_experts_per_tok=draw.choice([number for number in (2, 4, 8) if number <= experts]),
        moe_intermediate_size=ffn if family in ONE_WIDTH_FAMILIES else draw.choice((32, 56, 96, 256)),
        num_shared_experts=(draw.choice((1, 2)) if family in DENSE_LAYERS else 1) if family in SHARED_EXPERTS else 0,
        num_dense_layers=draw.choice((0, 1, 2)) if family in DENSE_LAYERS else 0,
        num_groups=draw.choice((0, 1, 2, experts)) if family == "deepseek_v2" else 0,
    )


def _latent(draw: Random, *, indexed: bool) -> MlaSpec:
    rotary, bare = draw.choice((8, 16, 32)), draw.choice((8, 16, 32, 64, 128))
    values = draw.choice((bare + rotary, bare, 24, 64))
    queries, keys = draw.choice((None, 16, 48, 96)), draw.choice((16, 40, 64))
    made = MlaSpec(
        q_lora_rank=queries, kv_lora_rank=keys, qk_nope_head_dim=bare, qk_rope_head_dim=rotary, v_head_dim=values
    )  # fmt: skip
    if not indexed:
        return made
    return replace(
        made, q_lora_rank=queries or 40, index_n_heads=draw.choice((1, 2, 4, 8)),
        index_head_dim=rotary + draw.choice((8, 32, 96)), index_topk=draw.choice((8, 48, 2048)),
    )  # fmt: skip


def _linear(draw: Random) -> LinearSpec:
    keys = draw.choice((1, 2, 3))
    return LinearSpec(
        num_key_heads=keys,
        num_value_heads=keys * draw.choice((1, 2)),
        key_head_dim=draw.choice((8, 10, 24, 32)),
        value_head_dim=draw.choice((8, 14, 32)),
        conv_kernel_dim=draw.choice((2, 4)),
    )


def _state_space(draw: Random, family: str, heads: int, head_dim: int, hidden: int) -> LinearSpec:
    if family == "kimi_linear":
        heads, width = draw.choice((1, 2, 3, 4)), draw.choice((8, 16, 24, 32))
        return LinearSpec(
            num_key_heads=heads,
            num_value_heads=heads,
            key_head_dim=width,
            value_head_dim=width,
            conv_kernel_dim=draw.choice((2, 4)),
        )
    if family == "minimax":
        return lightning(heads, head_dim, draw.choice((16, 32, 64, 256)))
    groups, times = draw.choice((1, 2)), draw.choice((1, 2))
    heads = next(number for number in (6 * groups, 8 * groups, 4 * groups) if times * hidden % number == 0)
    return LinearSpec(
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=draw.choice((8, 16, 64)),
        value_head_dim=times * hidden // heads,
        conv_kernel_dim=draw.choice((2, 4)),
        chunk_size=draw.choice((32, 64, 128, 256)),
    )


# --- what a run shows, and what is said of it -----------------------------------------------------------------------------


def run_of(case: Case) -> BlockRun:
    """Run forward and backward once on a fake GPU, which it installs in this process."""
    return runs_of(case, [case.block])[0]


def _wide_router(spec: ModelSpec) -> bool:
    """Return whether the installed transformers keeps the routers of a model of 16 bits in fp32."""
    return spec.traits.wide_router == "yes" or (
        spec.traits.wide_router == "since 5.24" and release_of(installed_transformers()).wide_routers
    )


def runs_of(case: Case, numbers: Sequence[int]) -> list[BlockRun]:
    """Return the same of several blocks, in one run."""
    spec, compute, size, _ = case
    install_node(ClusterSpec(gpu=gpu("t4-16gb" if compute.kernels == "cuda-7" else "h100-sxm-80gb")))
    tracker, at = Tracker(device=CUDA), dict[str, int]()
    half, mixed = (torch.float16, "fp16-mixed") if compute.is_fp16 else (torch.bfloat16, "bf16-mixed")
    precision = mixed if compute.autocast else {2: "bf16", 4: "fp32"}[compute.element_bytes]
    recipe = RecipeSpec(
        engine="ddp", zero_stage=0, precision=precision, attention=compute.attention, recompute=compute.recompute
    )  # fmt: skip
    stored = torch.float32 if compute.element_bytes == 4 or (compute.autocast and spec.adapter is None) else half
    away = offloading_from(CUDA, tracker) if compute.offloaded else nullcontext()
    with fake_tensors(tracker, CUDA), torch.device(CUDA), tracker, away:
        model = causal_module(spec, recipe, stored, CUDA)
        for weight in model.parameters() if _wide_router(spec) else ():
            weight.data = weight.data.to(stored)  # as DeepSpeed and FSDP2's policy do
        if compute.offloaded:
            offload_blocks(model, find_blocks(model))
        for index, block in enumerate(find_blocks(model)):
            block.register_forward_pre_hook(_before(tracker, at, index))
            block.register_forward_hook(_after(tracker, at, index))
        ids = torch.randint(0, spec.vocab_size, (size.micro_batch_size, size.seq_len))
        with torch.autocast(CUDA, dtype=half) if compute.autocast else nullcontext():
            loss = model(input_ids=ids, labels=ids, attention_mask=mask_of_padding(ids) if compute.padded else None).loss
        loss.backward()
        live = Timeline(tracker.recording).live
    return [_of_block(live, at, number) for number in numbers]


def _of_block(live: Sequence[int], at: Mapping[str, int], number: int) -> BlockRun:
    begun, back = (live[at[f"{phase} {number}"]] for phase in ("forward", "backward"))
    forward, backward = (
        max(live[at[f"{phase} {number}"] : at[f"{phase} {number} end"] + 1]) for phase in ("forward", "backward")
    )  # fmt: skip
    return BlockRun(live[at[f"forward {number + 1}"]] - begun, forward - begun, backward - back)


def _noting(tracker: Tracker, at: dict[str, int], name: str) -> Callable[[], None]:
    return lambda: at.__setitem__(name, tracker.now)


def _before(tracker: Tracker, at: dict[str, int], index: int) -> Callable[..., object]:
    def hook(_block: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        _noting(tracker, at, f"forward {index}")()
        return (Passage.apply(inputs[0], _noting(tracker, at, f"backward {index} end")), *inputs[1:])

    return hook


def _after(tracker: Tracker, at: dict[str, int], index: int) -> Callable[..., object]:
    def hook(_block: torch.nn.Module, _inputs: object, output: object) -> object:
        _noting(tracker, at, f"forward {index} end")()
        return passed(output, _noting(tracker, at, f"backward {index}"))

    return hook


def said_of(case: Case) -> BlockRun:
    """Return the estimate for the same moments, without the scratch of kernels.

    The engine counts casts: in the forward autocast's cache holds all casts of a block, later autograd those of matrices.
    """
    spec, compute, size, _ = case
    block, recomputed = block_pass(spec, case.layers.kind, compute, size), compute.recompute != "none"
    wide = [one for one in case.layers.parameters if one.autocast and (spec.adapter is None or not one.frozen)]
    cast = wide if compute.autocast else []
    entered = _bytes(block.entered)
    kept, cached = _bytes(block.kept(compute.recompute)), 2 * sum(one.numel for one in cast)
    own = 2 * block.cast_elements if compute.autocast and not recomputed else 0
    hidden = _of_residual(case) * size.micro_batch_size * size.seq_len * spec.hidden_size
    given = hidden + (_picked_below(case) if recomputed else 0)
    forward = [line for line in (block.forward_recompute if recomputed else block.forward) if " block below" not in line.reason]
    live_casts = 2 if compute.autocast else 0
    highest = max(
        _bytes(point.lines) + _of_gradients(case) * point.gradients + live_casts * point.live_casts for point in block.points
    )  # fmt: skip
    beside = _bytes(block.checkpoint_in_backward) if recomputed else 0
    return BlockRun(
        kept + cached + _handed_up(case) + _bytes(block.named),
        kept + cached + entered + _bytes(tuple(forward)) - given,
        highest + beside - kept - own - hidden - _bytes(block.arriving),
    )


def _handed_up(case: Case) -> int:
    """Return the attention weights that Bamba's model holds to the end of the next block, minus those of the block below.

    [bytes]
    """
    spec, compute, size, block = case
    if (kinds := kinds_by_indexer(spec)) and compute.recompute != "none":
        return _keys(case) * ((kinds[block] == "moe") - (kinds[block] == HANDED))
    if spec.family != "bamba" or compute.attention != "eager" or compute.recompute == "none":
        return 0
    each = _of_residual(case) * size.micro_batch_size * spec.num_attention_heads * size.seq_len**2
    return each * ((spec.letters[block] == "*") - (spec.letters[block - 1] == "*"))


def _picked_below(case: Case) -> int:
    """Bytes of the keys that the layer below picked, which a layer of GLM-5 gets."""
    if case.spec.family != "glm_moe_dsa" or (kinds_by_indexer(case.spec) and case.layers.kind in ("moe", SHARED)):
        return 0
    return _keys(case)


def _keys(case: Case) -> int:
    """Bytes of the keys that one layer picks."""
    assert case.spec.mla is not None
    return 4 * case.size.micro_batch_size * case.size.seq_len * min(case.size.seq_len, case.spec.mla.index_topk)


def _of_gradients(case: Case) -> int:
    """Bytes of an element of a weight's gradient."""
    return 4 if case.compute.autocast else case.compute.element_bytes


def _of_residual(case: Case) -> int:
    """Bytes of an element of the residual stream, which frozen weights of 16 bits keep narrow under autocast."""
    wide = case.spec.adapter is None or case.spec.upcasts_norms
    return 4 if case.compute.autocast and wide else case.compute.element_bytes


def _bytes(lines: tuple[Line, ...]) -> int:
    return sum(int(line.n_bytes) for line in lines if line.tag != SCRATCH)


def too_high(case: Case) -> tuple[int, int]:
    """By how much the estimate may be above a forward and a backward: what autograd or autocast lets go of earlier.

    Autocast keeps no copy of a view: of a convolution's weight, and of Falcon's matrices. A checkpoint's input goes with the last
    operator that saved something, where autocast's casts come after that: in a block that saves casts of its input alone. Linear
    attention may be the highest moment of a forward, before autocast casts the weights of the MLP behind it. bitsandbytes casts an
    fp32 bias to 16 bits in its layer's first forward.
    """
    narrowed = 2 * sum(one.numel for one in case.layers.parameters if is_bias(one)) if case.spec.upcasts_norms else 0
    if LINEAR_KERNELS in case.compute.fused and case.compute.autocast and case.spec.adapter is None:
        # The kernels read a convolution's weights in fp32, and keep no copy of Mamba-2's output projection in a checkpoint.
        names = ("conv1d.", "mamba.out_proj", "mixer.out_proj") if case.compute.recompute != "none" else ("conv1d.",)
        uncopied = [one for one in case.layers.parameters if one.autocast and any(name in one.name for name in names)]
        narrowed += 2 * sum(one.numel for one in uncopied)
    if not case.compute.autocast or case.compute.recompute == "none" or case.spec.adapter is not None:
        return narrowed, 0
    viewed = ("weight",) if case.spec.family == "falcon" else ("conv1d.weight", "conv.conv.weight")
    views = 2 * sum(one.numel for one in case.layers.parameters if one.autocast and one.name.endswith(viewed))
    if case.spec.family in ("qwen3_5_text", "qwen3_5_moe_text"):
        return views + 2 * sum(one.numel for one in case.layers.parameters if one.autocast and one.name.startswith("mlp.")), 0
    hidden = _of_residual(case) * case.size.micro_batch_size * case.size.seq_len * case.spec.hidden_size
    return views + narrowed, hidden if case.spec.family in ("olmo2", "olmo3", "olmo_hybrid") else 0


def differences(case: Case) -> tuple[int, ...]:
    """Return run minus estimate wherever they differ by more than the saved random state; empty if they agree. [bytes]"""
    return differences_from(run_of(case), case)


def differences_from(measured: BlockRun, case: Case) -> tuple[int, ...]:
    """Return the same for a run that was measured before. [bytes]"""
    more = [run - said for run, said in zip(measured, said_of(case), strict=True)]
    forward, backward = too_high(case)
    if case.compute.padded:  # the last block with a mask of the tokens frees it
        backward += 8 * case.size.micro_batch_size * case.size.seq_len
    least = -forward, -forward, -RANDOM_STATE - backward
    return tuple([one for one, low in zip(more, least, strict=True) if not low <= one <= RANDOM_STATE])


def main() -> None:
    """Print every block that differs."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("families", nargs="?", default=",".join(FAMILIES))
    asked.add_argument("--cases", type=int, default=300)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--padded", action="store_true", help="sequences that end in padding")
    asked.add_argument("--old-gpu", action="store_true", help="before compute capability 8.0")
    options = asked.parse_args()
    draws = on_an_old_gpu if options.old_gpu else with_padding if options.padded else drawn
    for family in options.families.split(","):
        found = 0
        for number in range(options.seed, options.seed + options.cases):
            case = draws(Random(f"{family} {number}"), family)  # noqa: S311  draws tests
            if beyond := differences(case):
                found += 1
                print(f"{family} {number}: {beyond} of {case}")  # noqa: T201
        print(f"{family}: {options.cases - found} of {options.cases} agree")  # noqa: T201


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
