"""Draws random valid jobs: every engine, stage, family, precision, optimizer and kind of parallelism.

Each is drawn from a ``random.Random``, so a seed always gives the same job, for Hypothesis and at night. Combinations that
:mod:`zeroplan.spec` refuses are not drawn.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import lcm
from random import Random
from typing import Any, NamedTuple, TypeVar, get_args

from tests.drawn_profiles import profile
from tests.profiles import by_hand
from tests.rare_draws import with_one_more
from zeroplan import BatchSpec, ClusterSpec, DdpOptions, Fsdp2Options, JobSpec, MeshSpec, ModelSpec, MoeSpec, RecipeSpec
from zeroplan.catalog.gpu import gpu, gpu_names
from zeroplan.engines.optimizers import IMPLEMENTATIONS, RAISES_ON_DTENSORS
from zeroplan.engines.published_optimizers import PUBLISHED
from zeroplan.errors import SpecError
from zeroplan.spec import megatron
from zeroplan.spec.adapter import GROUPS, AdapterSpec
from zeroplan.spec.family import (
    ALWAYS_SHARED_EXPERTS,
    DENSE_LAYERS,
    DISPATCHED_FAMILIES,
    FAMILIES,
    FILLING_HEADS,
    FREE_ACTIVATION,
    INDEXED_FAMILIES,
    LATENT_FAMILIES,
    MOE_FAMILIES,
    ONE_WIDTH_FAMILIES,
    PATTERNED,
    PLAIN_HEADS,
    SHARED_EXPERTS,
    SOME_WINDOWED,
    TRAITS,
    WINDOWED_FAMILIES,
    modelled,
)
from zeroplan.spec.frozen import PARTS, FrozenSpec
from zeroplan.spec.hardware import GpuSpec, SharesSpec
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.spec.linear_kernels import runs_by_kernels
from zeroplan.spec.model import LinearSpec, MlaSpec, PerLayerSpec, lightning
from zeroplan.spec.pipeline import SPLIT
from zeroplan.spec.profile import model_of
from zeroplan.spec.recipe import ADAM, ON_PAPER, DeepSpeedOptions, Fsdp1Options, MegatronOptions
from zeroplan.spec.split import split_families
from zeroplan.spec.traits import ATTENTION, Activation
from zeroplan.spec.vision import VisionSpec

T = TypeVar("T")

ENGINES = tuple(ENGINE_STAGES)
#: Families without grouped heads, whose class fixes the biases.
_OPTIMIZERS = tuple(sorted(name for name in IMPLEMENTATIONS if name not in PUBLISHED or name == "adamw-8bit"))
_DEEPSPEED_OPTIMIZERS = tuple(name for name in _OPTIMIZERS if name != "muon")
_SPLIT_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop")
#: Families that may have parameters of unknown place, of which only the number is known.
PLACED_ELSEWHERE = ("llama",)
_UNTIED = ("nemotron_h", "kimi_linear")
_FIXED_BIASES = {
    "mistral": (False, False), "phi3": (False, False), "mixtral": (False, False), "gpt2": (True, True), "opt": (True, True),
    "bloom": (True, True), "starcoder2": (True, True), "ministral3": (False, False), "ernie4_5": (False, False),
    "falcon": (False, False), "nemotron_h": (False, False), "ernie4_5_moe": (False, False), "phi": (True, True),
}  # fmt: skip


def _about(draw: Random, low: int, high: int) -> int:
    """A random integer between the two, of any order of magnitude."""
    return draw.randint(low, min(high, max(low, 1) << draw.randint(0, (high // max(low, 1)).bit_length())))


def _mostly(draw: Random, usual: T, *others: T) -> T:
    """The usual value in three of four draws."""
    return draw.choice(others) if draw.randint(0, 3) == 3 else usual


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- models --------------------------------------------------------------------------------------------------------------


def model(draw: Random, families: Sequence[str] = FAMILIES, *, ranks: int = 1, layers: int = 1) -> ModelSpec:
    """A model of a few thousand to a trillion parameters that ``ranks`` can split; its layers are a multiple of ``layers``."""
    family = draw.choice(families)
    heads, kv_heads, head_dim = _heads(draw, family, ranks)
    wide = family in FILLING_HEADS or draw.randint(0, 2)
    hidden = heads * head_dim if wide else 8 * _about(draw, 1, 1024)
    ffn = 4 * hidden if family == "bloom" else _up(8 * _about(draw, 1, 4000), ranks)
    positions = draw.choice((64, 1024, 2048)) if family in ("gpt2", "opt") else draw.choice((4096, 2**20))
    attention_bias, mlp_bias = _biases(draw, family)
    n_layers = layers * _about(draw, 1, max(1, 96 // layers))
    mla = _latent(draw, indexed=TRAITS[family].indexed) if family in LATENT_FAMILIES else None
    traits, gemma_4 = TRAITS[family], family == "gemma4_text"
    n_layers = 6 * n_layers if gemma_4 else n_layers
    pattern = draw.choice(_patterns(family)) if family in PATTERNED else ""
    window = _mostly(draw, None, _about(draw, 1, 8192)) if family in WINDOWED_FAMILIES else None
    window = 512 if gemma_4 or family == "exaone_moe" else window
    made = ModelSpec(
        name=_mostly(draw, "", "mine"),
        family=family, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=n_layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        vocab_size=_up(_about(draw, 16, 260_000), ranks), max_position_embeddings=positions,
        unplaced_parameters=_mostly(draw, 0, _about(draw, 1, 10**9)) if family in PLACED_ELSEWHERE else 0,
        positions={"gpt2": positions, "opt": positions + 2}.get(family, 0),
        tie_word_embeddings=draw.choice((False, True)) and family not in _UNTIED, attention_bias=attention_bias, mlp_bias=mlp_bias,
        sliding_window=window,
        max_window_layers=draw.randint(0, n_layers - 1) if family in SOME_WINDOWED and window is not None else 0,
        global_head_dim=2 * head_dim if gemma_4 else 0, global_key_value_heads=kv_heads if gemma_4 else 0,
        hidden_act=_mostly(draw, None, *get_args(Activation)) if family in FREE_ACTIVATION else None,
        parallel_residual=family != "gpt_neox" or _mostly(draw, True, False),
        moe=_experts(draw, family, ffn, n_layers) if family in MOE_FAMILIES and "-" not in pattern else None,
        mla=mla, layer_pattern=pattern, rotary=not traits.rotary_optional or (not traits.one_module and draw.choice((False, True))),
        linear=_states(draw, family, heads, head_dim, hidden) if traits.linear else None,
        use_qk_norm=TRAITS[family].head_norms is None and draw.choice((False, True)),
    )  # fmt: skip
    if gemma_4 and made.vocab_size % 2:
        return replace(made, moe=None, per_layer=_per_layer(made), global_key_value_heads=made.num_key_value_heads)
    if family == "glm_moe_dsa" and mla is not None and made.moe is not None and made.moe.num_dense_layers:
        return replace(made, mla=replace(mla, index_every=draw.choice((1, 2, 4))))
    return made


def _per_layer(made: ModelSpec) -> PerLayerSpec:
    """Embeddings of each layer; makes no draw, so that other jobs stay unchanged."""
    every, shared = (3, 6)[made.hidden_size // 8 % 2], 6 * (made.num_hidden_layers // 12)
    return PerLayerSpec(
        width=8 * (1 + made.vocab_size % 5), vocab_size=made.vocab_size + made.hidden_size % 3, global_every=every,
        shared_layers=shared, wide_mlp=shared > 0 and made.intermediate_size % 16 > 0,
    )  # fmt: skip


#: Orders of the kinds of layers in families that have an order of their own.
_PATTERNS = {
    "llama4_text": ("LLG", "LDG"), "exaone_moe": ("DLLG", "LLLG"), "lfm2": ("C", "CC*", "*"),
    "lfm2_moe": ("c" + "C*C" * 40, "D" + "C*" * 60),  # dense layers come first only, so the pattern never repeats
    "kimi_linear": ("mM*", "MD", "m"),
}  # fmt: skip


def _patterns(family: str) -> tuple[str, ...]:
    if family in _PATTERNS:
        return _PATTERNS[family]
    traits = TRAITS[family]
    return ("M-*", "ME*") if traits.one_module else ("H", "N") if traits.one_kind else ("M", "MM*", "*")


def _heads(draw: Random, family: str, ranks: int) -> tuple[int, int, int]:
    kv_heads = ranks * _about(draw, 1, max(1, 32 // ranks))
    groups = 1 if family in (*PLAIN_HEADS, *LATENT_FAMILIES) else draw.randint(1, 8)
    if family == "falcon":
        groups = max(2, groups)
    return groups * kv_heads, kv_heads, TRAITS[family].rotary_width + 2 * TRAITS[family].rotary_divisor * _about(draw, 2, 32)


def _biases(draw: Random, family: str) -> tuple[bool, bool]:
    """Whether attention and MLP have biases, as the family's class allows."""
    if family in _FIXED_BIASES:
        return _FIXED_BIASES[family]
    attention = family == "qwen2" or draw.choice((False, True))
    return attention, family in ("gpt_neox", "gpt_oss") or (family == "llama" and _mostly(draw, False, True))


def _experts(draw: Random, family: str, ffn: int, layers: int) -> MoeSpec:
    experts = draw.choice((2, 4, 8, 16, 64, draw.randint(2, 128)))
    return MoeSpec(
        num_experts=experts,
        num_experts_per_tok=draw.randint(1, min(8, experts)),
        moe_intermediate_size=ffn if family in ONE_WIDTH_FAMILIES else 8 * _about(draw, 1, 512),
        num_shared_experts=draw.randint(family in ALWAYS_SHARED_EXPERTS, 2) if family in SHARED_EXPERTS else 0,
        num_dense_layers=_mostly(draw, 0, draw.randint(0, layers)) if family in DENSE_LAYERS else 0,
    )


def _latent(draw: Random, *, indexed: bool) -> MlaSpec:
    queries = draw.choice((None, 8 * _about(draw, 1, 200)))
    made = MlaSpec(
        q_lora_rank=queries, kv_lora_rank=8 * _about(draw, 1, 64), qk_nope_head_dim=2 * _about(draw, 4, 64),
        qk_rope_head_dim=2 * _about(draw, 2, 32), v_head_dim=2 * _about(draw, 4, 64),
    )  # fmt: skip
    if not indexed:
        return made
    return replace(
        made, q_lora_rank=queries or 8, index_n_heads=_about(draw, 1, 64), index_topk=_about(draw, 1, 2048),
        index_head_dim=made.qk_rope_head_dim + 2 * _about(draw, 1, 64),
    )  # fmt: skip


def _states(draw: Random, family: str, heads: int, head_dim: int, hidden: int) -> LinearSpec:
    if family == "minimax":
        return lightning(heads, head_dim, draw.choice((32, 256)))
    if family == "kimi_linear":
        return replace(lightning(_about(draw, 1, 64), 8 * _about(draw, 1, 32), 64), conv_kernel_dim=draw.choice((2, 4)))
    return _state_space(draw, hidden) if family in PATTERNED else _linear(draw)


def _state_space(draw: Random, hidden: int) -> LinearSpec:
    heads = next(number for number in (8, 4, 2, 1) if hidden % number == 0)
    return LinearSpec(
        num_key_heads=draw.choice([number for number in (1, 2) if heads % number == 0]), num_value_heads=heads,
        key_head_dim=8 * _about(draw, 1, 32), value_head_dim=draw.choice((1, 2)) * hidden // heads,
        conv_kernel_dim=draw.choice((2, 4)), chunk_size=draw.choice((64, 128, 256)),
    )  # fmt: skip


def _linear(draw: Random) -> LinearSpec:
    keys = _about(draw, 1, 16)
    return LinearSpec(
        num_key_heads=keys, num_value_heads=keys * draw.randint(1, 4), key_head_dim=2 * _about(draw, 2, 64),
        value_head_dim=2 * _about(draw, 2, 64), conv_kernel_dim=_mostly(draw, 4, draw.randint(1, 8)),
    )  # fmt: skip


def adapted(draw: Random) -> ModelSpec:
    """A model with LoRA, or QLoRA."""
    names = [draw.choice((*GROUPS, *GROUPS["all-linear"])) for _ in range(draw.randint(1, 3))]
    quantize = draw.choice(("none", "nf4", "nf4-double"))
    adapter = AdapterSpec(
        rank=_about(draw, 1, 256), targets=",".join(names), quantize=quantize, dropout=draw.choice((False, False, True)),
        upcast=draw.choice(("all", "all", "norms", "none")),
    )  # fmt: skip
    return replace(model(draw, modelled("adapters everywhere")), adapter=adapter)


def partly_frozen(draw: Random) -> ModelSpec:
    """A model with frozen parts."""
    one = model(draw, modelled("adapters everywhere"))
    parts = [part for part in PARTS if draw.choice((False, True))]
    if one.tie_word_embeddings and ("head" in parts) != ("embedding" in parts):
        parts = ["embedding", "head"]
    layers = draw.randint(0 if parts else 1, 9)
    deep = replace(one, num_hidden_layers=layers + draw.randint(1, 9), max_window_layers=0)
    return replace(deep, frozen=FrozenSpec(parts=",".join(parts), layers=layers))


@cache
def _profiled(number: int) -> ModelSpec:
    """One of a few profiled modules, cached because making one takes longer than an estimate."""
    return model_of(profile(Random(number)) if number else by_hand())  # noqa: S311  nothing secret is drawn


def profiled(draw: Random) -> ModelSpec:
    """A profiled module."""
    return _profiled(draw.randint(0, 100))


# --- recipes -------------------------------------------------------------------------------------------------------------

#: Combinations of parallelism under FSDP2.
_WAYS = (
    "tp", "cp", "tp cp", "ep", "tp ep", "cp ep", "tp cp ep", "pp", "pp tp", "pp cp", "pp tp cp", "pp ep", "pp tp ep", "pp cp ep",
)  # fmt: skip
#: The engines for each manner of training; a recipe obeys every word of its manner.
_MANNERS = {
    "whole": ("ddp", "fsdp1", "fsdp2", "deepspeed", "paper", "megatron"), "lora": ("ddp", "fsdp1", "fsdp2", "deepspeed"),
    "frozen": ("ddp", "fsdp2", "deepspeed"), "profile": ("ddp", "fsdp2", "deepspeed"), "divided": ("paper",),
    **dict.fromkeys(_WAYS, ("fsdp2",)),
}  # fmt: skip


def recipe(draw: Random, engines: Sequence[str] = ENGINES, *, manner: str = "whole") -> RecipeSpec:
    """A recipe that an engine offers for this manner of training."""
    engine = draw.choice([name for name in _MANNERS[manner] if name in engines])
    stages = sorted(ENGINE_STAGES[engine])  # type: ignore[index]
    said = {
        "engine": engine,
        "zero_stage": draw.choice((*stages, stages[-1])),  # the last stage has most options
        **(_of_megatron(draw) if engine == "megatron" else _free(draw)),
    }
    said |= _optimizer(draw, engine, manner)
    _only_what_goes(said, {*manner.split()})
    if engine == "ddp":
        said["ddp"] = _ddp(draw)
    if engine == "fsdp1":
        said["fsdp1"] = _fsdp1(draw, adapted="lora" in manner, recompute=said["recompute"])
    if engine == "fsdp2":
        said["fsdp2"] = _fsdp2(draw, said, manner)
    if engine == "deepspeed":
        said["deepspeed"] = _deepspeed(draw, said, manner)
    if engine == "megatron":
        said["megatron"] = _megatron_options(draw, said["attention"])
    if engine == "paper":
        said |= _paper(draw)
    return RecipeSpec(**said)


def _ddp(draw: Random) -> DdpOptions:
    return DdpOptions(
        gradient_as_bucket_view=draw.choice((False, True)), bucket_cap_mb=_mostly(draw, None, 1, 100),
        find_unused_parameters=_mostly(draw, False, True), static_graph=_mostly(draw, False, True),
        wrap_one_rank=draw.choice((False, True)),
    )  # fmt: skip


def _free(draw: Random) -> dict[str, Any]:
    found = {
        "precision": draw.choice(("bf16-mixed", "bf16-mixed", "fp16-mixed", "bf16", "fp32")),
        "recompute": draw.choice(("none", "selective", "full")),
        "attention": draw.choice(("sdpa", "sdpa", "flash", "eager")),
        "loss": _mostly(draw, "full", "chunked", "fused"),
        "keep_logits": _mostly(draw, False, True, "fp32"),
        "sync_every_micro_batch": draw.choice((True, False)),
        "offload_activations": _mostly(draw, False, True),
        "kernels": _mostly(draw, "cuda", "cpu"),
    }
    apart = Random(str(found))  # noqa: S311  so that other draws stay as they are
    return found | {"step_kernels": _mostly(apart, None, "eager", "fused", "compiled")}


def _of_megatron(draw: Random) -> dict[str, Any]:
    return {
        "precision": draw.choice(megatron.PRECISIONS),
        "recompute": draw.choice(("none", "selective", "full")),
        "attention": _mostly(draw, "sdpa", "flash", "eager"),
        "sequence_parallel": draw.choice((True, False)),
    }


def _megatron_options(draw: Random, attention: str) -> MegatronOptions:
    reduced = draw.choice((True, False))
    options = MegatronOptions(
        overlap_grad_reduce=reduced, overlap_param_gather=reduced and draw.choice((True, False)),
        overlap_p2p_comm=_mostly(draw, True, False),
        transformer_impl=draw.choice(("transformer_engine", "local")) if attention == "eager" else "transformer_engine",
        cross_entropy_fusion_impl=_mostly(draw, None, "native", "te"), transformer_engine_release=_mostly(draw, "2.18", "2.17"),
        cp_comm_type=_mostly(draw, "p2p", "a2a"), hidden_dropout=_mostly(draw, None, True, False),
        attention_dropout=_mostly(draw, None, True, False), create_attention_mask_in_dataloader=_mostly(draw, True, False),
        gradient_accumulation_fusion=_mostly(draw, True, False), deterministic_mode=_mostly(draw, False, True),
        grad_reduce_in_bf16=_mostly(draw, False, True), swiglu=_mostly(draw, None, True, False),
        recompute_modules=_mostly(draw, "core_attn", "core_attn,layernorm,mlp", "moe_act,mla_up_proj", "moe"),
        recompute_num_layers=_mostly(draw, 1, 2), qk_layernorm=_mostly(draw, None, True),
        masked_softmax_fusion=_mostly(draw, True, False),
        attention_softmax_in_fp32=_mostly(draw, False, True), moe_grouped_gemm=_mostly(draw, True, False),
        moe_token_dispatcher_type=_mostly(draw, "alltoall", "allgather"), moe_router_dtype=_mostly(draw, None, "fp32"),
        moe_shared_expert_intermediate_size=_mostly(draw, None, 64), moe_aux_loss=_mostly(draw, False, True),
    )  # fmt: skip
    apart = Random(str(options))  # noqa: S311  so that other draws stay as they are
    release = _mostly(apart, options.transformer_engine_release, "2.2")
    dispatcher = _mostly(apart, options.moe_token_dispatcher_type, "flex")
    core = "0.13" if dispatcher == "flex" else _mostly(apart, "0.13", "0.12")
    turns, beside = _mostly(apart, True, False), _mostly(apart, 0, 2)
    return replace(options, transformer_engine_release=release, moe_token_dispatcher_type=dispatcher, core_release=core,
                   apply_rope_fusion=turns, gradients_beside=beside)  # fmt: skip


def _optimizer(draw: Random, engine: str, manner: str) -> dict[str, Any]:
    if engine == "megatron":
        return {"optimizer": draw.choice(ADAM), "optimizer_impl": draw.choice((None, "fused"))}
    offered = _DEEPSPEED_OPTIMIZERS if engine == "deepspeed" else _OPTIMIZERS
    if engine == "fsdp2":
        offered = tuple(name for name in offered if (name, IMPLEMENTATIONS[name][0]) not in RAISES_ON_DTENSORS)
    optimizer = draw.choice(("adamw", draw.choice(_SPLIT_OPTIMIZERS if "tp" in manner.split() else offered)))
    steps = [one for one in IMPLEMENTATIONS[optimizer] if engine != "fsdp2" or (optimizer, one) not in RAISES_ON_DTENSORS]
    return {"optimizer": optimizer, "optimizer_impl": draw.choice((None, *steps))}


def _only_what_goes(said: dict[str, Any], manner: set[str]) -> None:
    """Reset settings that zeroplan refuses in combination with others."""
    engine = said["engine"]
    if manner & {"tp", "cp", "pp", "profile"}:
        said |= {"loss": "full"}
    if manner & {"tp", "cp"}:
        said["attention"] = "sdpa"
    if "whole" not in manner or engine in ("paper", "megatron") or said["recompute"] == "none":
        said["offload_activations"] = False
    if said.get("keep_logits") and (
        said.get("loss", "full") != "full" or (said["keep_logits"] == "fp32" and manner & {"pp", "profile"})
    ):
        said["keep_logits"] = False
    if "tp" in manner:
        said["sync_every_micro_batch"] = True
    if "cp" in manner and said["precision"] == "fp32":
        said["precision"] = "bf16-mixed"
    if engine == "deepspeed":
        said |= {(3, "selective"): {"recompute": "full"}}.get((said["zero_stage"], said["recompute"]), {})
        said |= {(0, "bf16"): {"precision": "bf16-mixed"}}.get((said["zero_stage"], said["precision"]), {})


def _paper(draw: Random) -> dict[str, Any]:
    by_megatron = _mostly(draw, False, True)
    return {
        "activation_model": "megatron" if by_megatron else "module",
        "sequence_parallel": by_megatron and draw.choice((True, False)),
    }


def _fsdp1(draw: Random, *, adapted: bool, recompute: str) -> Fsdp1Options:
    return Fsdp1Options(
        use_orig_params=draw.choice((False, True)), forward_prefetch=not adapted and _mostly(draw, False, True),
        backward_prefetch=_mostly(draw, "backward_pre", "backward_post", "no_prefetch"),
        limit_all_gathers=_mostly(draw, True, False),
        reduce_dtype=draw.choice(("fp32", "param")), wraps_adapters=adapted or draw.choice((True, False)),
        checkpoints_units=recompute == "full" and draw.choice((True, False)),
    )  # fmt: skip


def _fsdp2(draw: Random, said: dict[str, Any], manner: str) -> Fsdp2Options:
    whole = manner in ("whole", "lora", "frozen", "profile")
    away = manner in ("whole", "profile", "tp") and draw.randint(0, 4) == 4 and not said["offload_activations"]
    return Fsdp2Options(
        reshard_after_forward=draw.choice((None, None, True, False, *((2, 4) if whole else ()))),
        reduce_dtype=draw.choice(("fp32", "param")),
        cpu_offload=away,
        torch=draw.choice((None, "2.13", *(("2.15", "2.15") if "pp" not in manner.split() else ()))),
    )


def _deepspeed(draw: Random, said: dict[str, Any], manner: str) -> DeepSpeedOptions:
    """DeepSpeed's options, most of them at their defaults."""
    stage, chosen = said["zero_stage"], _numbers_of_deepspeed(draw)
    chosen |= {
        "overlap_comm": draw.choice((None, None, True, False)),
        "contiguous_gradients": _mostly(draw, True, False),
        "reduce_scatter": _mostly(draw, True, False),
        "compute_grad_norm": _mostly(draw, True, False) or stage not in (1, 2),
        "stage3_allgather_sequential": _mostly(draw, False, True),
        "memory_efficient_linear": _mostly(draw, True, False) or manner in ("lora", "frozen", "profile"),
        "torch_adam": _mostly(draw, False, True),
        "zero_init": _mostly(draw, True, False),
        "flatten_on_accelerator": _mostly(draw, True, False),
        "grad_accum_dtype": _mostly(draw, "param", "fp32"),
    }
    if manner == "lora" or stage == 0 or (stage == 1 and said["precision"] != "bf16-mixed"):
        chosen["grad_accum_dtype"] = "param"
    if stage == 1 and chosen["grad_accum_dtype"] == "fp32":
        chosen["compute_grad_norm"] = True
    special = draw.choice(("", "", "offload", "offload", "zero++")) if manner == "whole" else ""
    if special == "offload" and stage and said["precision"] != "bf16" and not said["offload_activations"]:
        chosen |= _away(draw, said, sums_in_fp32=chosen["grad_accum_dtype"] == "fp32")
    if special == "zero++" and stage == 3:
        chosen |= _plus_plus(draw, reduce_scatter=chosen["reduce_scatter"])
    return DeepSpeedOptions(**chosen)


def _numbers_of_deepspeed(draw: Random) -> dict[str, int]:
    ends = {
        "reduce_bucket_size": (1000, 10**9), "sub_group_size": (10**5, 2 * 10**9), "stage3_prefetch_bucket_size": (1, 10**9),
        "stage3_param_persistence_threshold": (1, 10**7), "stage3_max_live_parameters": (1, 2 * 10**9),
        "stage3_max_reuse_distance": (1, 2 * 10**9), "stage3_model_persistence_threshold": (1, 10**9),
    }  # fmt: skip
    return {name: _about(draw, *both) for name, both in ends.items() if draw.randint(0, 5) == 5}


def _away(draw: Random, said: dict[str, Any], *, sums_in_fp32: bool) -> dict[str, Any]:
    """Offload to host memory or to NVMe."""
    stage, adam = said["zero_stage"], said["optimizer"] in ("adam", "adamw")
    optimizer = draw.choice(("none", "cpu", *(("nvme",) if stage == 3 and adam else ()))) if stage == 3 else "cpu"
    parameters = draw.choice(("none", "cpu", "nvme")) if stage == 3 else "none"
    if stage == 1 and sums_in_fp32:
        optimizer = "none"
    chosen: dict[str, Any] = {"offload_optimizer": optimizer, "offload_param": parameters}
    chosen |= {name: _mostly(draw, True, False) for name in ("offload_optimizer_pin_memory", "offload_param_pin_memory")}
    if optimizer != "none":
        chosen["compute_grad_norm"] = True
    if "nvme" in (optimizer, parameters):
        chosen |= {
            "offload_optimizer_buffer_count": _mostly(draw, 12, 4, 8),
            "offload_param_buffer_count": _mostly(draw, 1000, 5),
            "offload_param_buffer_size": _mostly(draw, 10**11, 10**8),
            "offload_param_max_in_cpu": _mostly(draw, 0, 10**9, 10**7),
            "offload_optimizer_pipeline_read": draw.choice((False, True)),
            "offload_optimizer_pipeline_write": draw.choice((False, True)),
        }
    return chosen


def _plus_plus(draw: Random, *, reduce_scatter: bool) -> dict[str, Any]:
    return {
        "zero_hpz_partition_size": draw.choice((1, 2, 4, 8)),
        "zero_quantized_weights": draw.choice((False, True)),
        "zero_quantized_gradients": reduce_scatter and draw.choice((False, True)),
        "gpus_per_node": draw.choice((1, 2, 4, 8)),
    }


# --- jobs ----------------------------------------------------------------------------------------------------------------


def batch(draw: Random, one: ModelSpec | None = None, *, multiple: int = 1, steps: int = 1) -> BatchSpec:
    """A batch of any size; sequence lengths are multiples of ``multiple``, micro-batches of ``steps``."""
    longest = 8192 if one is None or not one.positions else one.max_position_embeddings
    traced = None if one is None else one.profile
    length = multiple * _about(draw, 1, max(1, longest // multiple))
    if traced is not None:
        length = traced.seq_len or max(length, traced.shortest)
    made = BatchSpec(
        micro_batch_size=_about(draw, 1, 32),
        seq_len=length,
        grad_accum_steps=steps * draw.choice((1, 1, 2, 3, 8) if steps == 1 else (1, 1, 2, 3)),
    )
    apart = Random(f"{made} {longest}")  # noqa: S311  so that other draws stay as they are
    longer = multiple * apart.randint(length // multiple, max(length, longest) // multiple)
    return replace(made, longest_seq_len=_mostly(apart, None, longer) if traced is None or not traced.seq_len else None)


def mesh(draw: Random, told: RecipeSpec, **ways: int) -> MeshSpec:
    """A mesh whose number of ranks is a multiple of the recipe's group sizes."""
    kept, second = told.fsdp2.reshard_after_forward, told.deepspeed.zero_hpz_partition_size
    factor = max(int(kept or 1) if told.engine == "fsdp2" else 1, second if told.engine == "deepspeed" else 1)
    if told.deepspeed.zero_quantized_gradients:
        factor = max(factor, told.deepspeed.gpus_per_node)
    ranks = factor * _about(draw, 1, max(1, 2048 // factor))
    return MeshSpec(
        dp_shard=_up(ranks, ways.get("ep", 1)),
        dp_replicate=_mostly(draw, 1, 2, 4) if told.engine in ("fsdp1", "fsdp2", "paper") else 1,
        **ways,
    )


def _whole(draw: Random, engines: Sequence[str]) -> JobSpec:
    told = recipe(draw, [name for name in engines if name != "megatron"])
    families = [name for name in FAMILIES if (name, told.attention) != ("gpt2", "eager") or not told.offload_activations]
    if told.engine != "fsdp2" or told.attention == "flash":
        families = [name for name in families if name not in INDEXED_FAMILIES]
    one = model(draw, families)
    made = JobSpec(
        model=one,
        recipe=_by_kernels(draw, _of_a_release(draw, _with_ends(draw, _of_some_layers(draw, told, one), one), one), one),
        mesh=mesh(draw, told),
        batch=batch(draw, one),
        cluster=_of_nodes(cluster(draw), told),
    )
    made = _with_linear_kernels(_all_away(made) if draw.randint(0, 2) == 2 else made)
    return _stepping_in_backward(made) if made.batch.seq_len % 2 else made  # makes no draw, so that other jobs stay unchanged


def _with_linear_kernels(made: JobSpec) -> JobSpec:
    """The job with linear attention by kernels, for two of three lengths. It makes no draw either."""
    if made.model.linear is None or made.batch.seq_len % 3 == 0 or not runs_by_kernels(made.model, made.recipe):
        return made
    return replace(made, recipe=replace(made.recipe, linear_attention="kernels"))


def _stepping_in_backward(made: JobSpec) -> JobSpec:
    """The job with an optimizer that steps inside the backward, if zeroplan models that."""
    for engine in ("ddp", "fsdp2"):
        with suppress(SpecError):
            options = replace(getattr(made.recipe, engine), step_in_backward=True)
            return replace(made, recipe=replace(made.recipe, **{engine: options}))
    return made


def _all_away(made: JobSpec) -> JobSpec:
    """The job with all saved activations in host memory, if it recomputes nothing and zeroplan models that."""
    if made.recipe.recompute != "none" or (made.recipe.engine == "deepspeed" and made.recipe.offloads_states):
        return made
    with suppress(SpecError):
        return replace(made, recipe=replace(made.recipe, offload_activations=True))
    return made


def _of_nodes(made: ClusterSpec, told: RecipeSpec) -> ClusterSpec:
    """The cluster with as many GPUs per node as the options of quantized gradients."""
    options = told.deepspeed
    return replace(made, gpus_per_node=options.gpus_per_node) if options.zero_quantized_gradients else made


def _of_some_layers(draw: Random, told: RecipeSpec, one: ModelSpec) -> RecipeSpec:
    """Now and then recompute only some blocks, if zeroplan models that."""
    if told.recompute == "none" or told.offload_activations or told.engine == "paper" or draw.randint(0, 3) < 3:
        return told
    return replace(told, recompute_layers=draw.randint(1, one.num_hidden_layers))


def _of_a_release(draw: Random, told: RecipeSpec, one: ModelSpec) -> RecipeSpec:
    """Train with an older release of transformers, if zeroplan models that."""
    usual = told.engine not in ON_PAPER and told.loss == "full" and told.kernels == "cuda"
    if (
        not usual
        or one.family not in modelled("older releases")
        or (one.sliding_window is not None and told.attention == "sdpa")
    ):
        return told
    return replace(told, transformers=draw.choice((None, "4.45", "4.48.1", "4.53", "4.55", "4.57", "5.0")))


def _with_ends(draw: Random, told: RecipeSpec, one: ModelSpec) -> RecipeSpec:
    """Now and then make embedding and head FSDP2 units, if zeroplan models that."""
    options = told.fsdp2
    resharded = options.reshard_after_forward is None or isinstance(options.reshard_after_forward, bool)
    usual = told.engine == "fsdp2" and told.loss == "full" and resharded and not one.positions and one.family != "bloom"
    if not usual or options.modules == "torchtitan" or draw.randint(0, 3) < 3:
        return told
    return replace(told, fsdp2=replace(options, ends_apart=True))


def _tuned(draw: Random, engines: Sequence[str]) -> JobSpec:
    told = recipe(draw, engines, manner="lora")
    one = adapted(draw)
    if told.engine in ("ddp", "fsdp1"):
        one = _as_trainers_do(draw, one, told)
    if told.engine == "fsdp1":
        told = replace(told, fsdp1=replace(told.fsdp1, ignores_adapters=draw.choice((False, True))))
    return _data_parallel(draw, one, _by_kernels(draw, _of_some_layers(draw, told, one), one))


def _as_trainers_do(draw: Random, one: ModelSpec, told: RecipeSpec) -> ModelSpec:
    """Adapters in fp32, on GPTQ weights, or with an older bitsandbytes, if zeroplan models that."""
    adapter = one.adapter
    assert adapter is not None
    if told.precision.endswith("mixed") and draw.choice((True, False)):
        adapter = replace(adapter, quantize="none", compute="fp32")
    elif told.precision == "fp16-mixed" and draw.choice((True, False)):
        adapter = replace(adapter, quantize="gptq", group_size=draw.choice((-1, 32, 128)))
    elif adapter.quantize != "none":
        older = ("0.43.1",) if told.recompute == "full" else ()
        adapter = replace(adapter, bitsandbytes=draw.choice((None, "0.46.1", *older)))
    return replace(one, adapter=adapter)


def _by_kernels(draw: Random, told: RecipeSpec, one: ModelSpec) -> RecipeSpec:
    """Now and then use fused kernels and reentrant checkpoints, if zeroplan models them."""
    if told.engine == "ddp" and told.recompute == "full":
        told = replace(told, reentrant=draw.choice((None, True, False)))
    if told.engine not in ("ddp", "fsdp1", "fsdp2") or told.kernels != "cuda" or draw.randint(0, 3) < 3:
        return told
    adapter = one.adapter
    there = ["rms-norm", "rope", "liger-rms-norm", "liger-swiglu", *(["cross-entropy"] if told.loss == "full" else [])]
    if adapter is not None and told.engine != "fsdp2" and adapter.quantize in ("nf4-double", "gptq"):
        there += ["lora"] if set(adapter.layers) <= set(ATTENTION) else []
    return replace(told, fused_kernels=",".join(draw.sample(there, draw.randint(1, len(there)))))


def _frozen(draw: Random, engines: Sequence[str]) -> JobSpec:
    return _data_parallel(draw, partly_frozen(draw), recipe(draw, engines, manner="frozen"))


def _profiled_job(draw: Random, engines: Sequence[str]) -> JobSpec:
    told, one = recipe(draw, engines, manner="profile"), profiled(draw)
    assert one.profile is not None
    return _data_parallel(draw, one, replace(told, attention=one.profile.attention))


def _data_parallel(draw: Random, one: ModelSpec, told: RecipeSpec) -> JobSpec:
    made = JobSpec(model=one, recipe=told, mesh=mesh(draw, told), batch=batch(draw, one), cluster=cluster(draw))
    return _all_away(made) if draw.randint(0, 2) == 2 else made


def _split(draw: Random, engines: Sequence[str]) -> JobSpec:
    """A job with one or several kinds of parallelism under FSDP2."""
    manner = draw.choice(_SPLITS)
    ways, told = manner.split(), recipe(draw, engines, manner=manner)
    tp, cp = (draw.choice((2, 4, 8)) if way in ways else 1 for way in ("tp", "cp"))
    pp = draw.choice((2, 2, 2, 4, 4, 8)) if "pp" in ways else 1
    one = replace(_splittable(draw, ways, tp), name=manner)
    if pp > 1:
        told = _scheduled(draw, told, ways, one)
        stages = pp * (told.pipeline_stages_per_rank or (2 if told.pipeline_schedule in SPLIT else 1))
        one = _in_stages(one, stages)
        told = replace(told, pipeline_layers=_cut_by_hand(draw, stages, one.num_hidden_layers))
    told = _of_some_layers(draw, told, one)
    fed = batch(draw, one, multiple=tp * (2 * cp if cp > 1 else 1), steps=pp)
    if one.sliding_window is not None and (tp > 1 or cp > 1 or told.pipeline_schedule in SPLIT):
        one = replace(one, sliding_window=fed.seq_len + one.sliding_window)
    split = mesh(draw, told, tp=tp, cp=cp)
    split = _with_experts(draw, one, split) if "ep" in ways else split
    return JobSpec(model=one, recipe=told, mesh=replace(split, pp=pp), batch=fed, cluster=cluster(draw))


def _splittable(draw: Random, ways: Sequence[str], tp: int) -> ModelSpec:
    """A model that supports all of these kinds of parallelism."""
    experts = split_families(with_experts=True) if {"tp", "cp", "pp"} & {*ways} else DISPATCHED_FAMILIES
    dense = split_families(with_experts=False) if {"tp", "cp"} & {*ways} else modelled("pipeline")
    families = experts if "ep" in ways else dense
    one = model(draw, families, ranks=tp)
    while "ep" in ways and one.moe is None:  # a pattern of layers may have no experts
        one = model(draw, families, ranks=tp)
    if one.mla is not None and "pp" in ways:
        one = replace(one, mla=replace(one.mla, index_every=1))
    if {"tp", "cp"} & {*ways}:
        one = replace(one, mlp_bias=False, attention_bias=one.family == "qwen2")
    return one


def _scheduled(draw: Random, told: RecipeSpec, ways: Sequence[str], one: ModelSpec) -> RecipeSpec:
    """A pipeline schedule that zeroplan models for this job, with several stages per rank if it has them."""
    there: list[Any] = [None, "gpipe", "1f1b", "interleaved-1f1b"]
    halved = len(ways) == 1 and one.moe is None
    schedule = draw.choice([*there, *SPLIT, *SPLIT] if halved else there)
    if schedule in SPLIT:
        kept = None if told.fsdp2.reshard_after_forward else told.fsdp2.reshard_after_forward
        options = replace(told.fsdp2, reshard_after_forward=kept)
        told = replace(told, recompute="none", fsdp2=options, zero_stage=told.zero_stage if kept is False else 2)
    each = {"interleaved-1f1b": (2, 2, 3), "interleaved-zero-bubble": (None, 2, 3), "zbv": (None, 2)}.get(schedule, (None, 1))
    return replace(told, pipeline_schedule=schedule, pipeline_stages_per_rank=draw.choice(each))


def _cut_by_hand(draw: Random, stages: int, layers: int) -> str | None:
    """The layers of each stage, at least one; None for torchtitan's own split."""
    if draw.random() < 0.6:
        return None
    borders = sorted(draw.sample(range(1, layers), stages - 1))
    return ",".join(str(stop - start) for start, stop in pairwise((0, *borders, layers)))


def _in_stages(one: ModelSpec, stages: int) -> ModelSpec:
    """The model with a layer for each stage, where embedding and head count as layers, and without dense first layers."""
    experts = None if one.moe is None else replace(one.moe, num_dense_layers=0)
    return replace(one, num_hidden_layers=max(one.num_hidden_layers, 2 * stages - 2), moe=experts, max_window_layers=0)


def _with_experts(draw: Random, one: ModelSpec, split: MeshSpec) -> MeshSpec:
    """The mesh with expert parallelism; ranks with the same experts shard them evenly."""
    assert one.moe is not None
    experts = one.moe.num_experts
    ep = draw.choice([ways for ways in range(2, experts + 1) if experts % ways == 0])
    split = replace(split, dp_shard=_up(split.dp_shard, ep), ep=ep)
    together = split.cp * split.tp
    sharing = split.dp_shard * together
    if sharing > experts and any(width % (sharing // ep) for width in (one.hidden_size, one.moe.moe_intermediate_size)):
        split = replace(split, dp_shard=lcm(ep, together) // together)
    return split


def _by_megatron(draw: Random, engines: Sequence[str]) -> JobSpec:
    told = recipe(draw, [name for name in engines if name == "megatron"])
    tp, cp, pp = (_mostly(draw, 1, 2, 4) for _ in range(3))
    each = draw.choice((1, 1, 2, 3)) if pp > 1 else 1
    of_script = told.recompute == "none" and not draw.randint(0, 3)  # else BERT's and T5's scripts would be rare
    if of_script:
        told, cp = replace(told, attention="eager"), 1
    families = ("gpt2",) if of_script else modelled("megatron")
    one = replace(model(draw, families, ranks=tp, layers=pp * each), hidden_act=None, max_window_layers=0)
    if pp > 1 and one.num_hidden_layers > 2 * pp * each and draw.randint(0, 3) == 3:
        one = replace(one, num_hidden_layers=one.num_hidden_layers - 2)  # embedding and loss count as one layer each
    by_hand = _cut_by_hand(draw, pp * each, one.num_hidden_layers) if pp > 1 else None
    told = replace(
        told,
        pipeline_layers=by_hand,
        sequence_parallel=told.sequence_parallel or (tp > 1 and one.moe is not None),
        attention="sdpa" if cp > 1 and told.attention == "eager" else told.attention,
        pipeline_schedule="interleaved-1f1b" if each > 1 else draw.choice((None, "1f1b")) if pp > 1 else None,
        pipeline_stages_per_rank=each if each > 1 else draw.choice((None, 1)) if pp > 1 else None,
    )
    told = replace(told, megatron=replace(told.megatron, **_megatron_in_detail(draw, told, one, pp=pp, interleaved=each > 1)))
    ep = draw.choice([ways for ways in (1, 2, 4) if one.moe.num_experts % ways == 0]) if one.moe else 1
    fed = batch(draw, one, multiple=2 * cp if cp > 1 else 1, steps=pp)
    own = _megatron_script(told, one, fed, pp=pp, cp=cp, ep=ep)
    told = replace(told, megatron=replace(told.megatron, **own))
    return JobSpec(model=one, recipe=told, mesh=mesh(draw, told, tp=tp, cp=cp, pp=pp, ep=ep), batch=fed, cluster=cluster(draw))


def _megatron_script(told: RecipeSpec, one: ModelSpec, fed: BatchSpec, *, pp: int, cp: int, ep: int) -> dict[str, Any]:
    """Options for Megatron-LM's BERT and T5 scripts and for overlapped expert communication, where they are valid."""
    apart = Random(f"{told} {one.name} {fed}")  # noqa: S311  so that other draws stay as they are
    if told.recompute != "none":
        return {}
    gathers = told.megatron.moe_token_dispatcher_type == "allgather"  # noqa: S105  tokens of text
    if one.moe is not None and ep > 1 and pp == 1 and not gathers and not one.moe.num_dense_layers:
        return {"overlap_moe_expert_parallel_comm": apart.choice((True, False))}
    if one.family != "gpt2" or told.attention != "eager" or not told.megatron.masked_softmax_fusion or cp > 1:
        return {}
    if apart.choice((True, False)):
        return {"pretrains": "bert", "bert_binary_head": apart.choice((True, False))}
    if pp > 1 or told.sequence_parallel:
        return {}
    longest = one.max_position_embeddings
    lengths = {"encoder_num_layers": apart.choice((None, 3)), "encoder_seq_length": apart.choice((None, max(1, longest // 2)))}
    return {"pretrains": "t5", **lengths}


def _megatron_in_detail(draw: Random, told: RecipeSpec, one: ModelSpec, *, pp: int, interleaved: bool) -> dict[str, Any]:
    """Megatron-LM options that exclude many others."""
    narrow = told.zero_stage == 1 and told.precision == "bf16-mixed" and draw.randint(0, 3) == 3
    defers = pp > 1 and told.megatron.gradient_accumulation_fusion and draw.choice((True, False))
    return {
        "make_vocab_size_divisible_by": _mostly(draw, 128, 64),
        "microbatch_group_size_per_virtual_pipeline_stage": _mostly(draw, None, pp, 2 * pp) if interleaved else None,
        "expert_tensor_parallel_size": _mostly(draw, 1, 2) if one.moe is not None else 1,
        "num_distributed_optimizer_instances": _mostly(draw, 1, 2) if told.zero_stage == 1 else 1,
        "defer_embedding_wgrad_compute": defers, "wgrad_deferral_limit": _mostly(draw, 0, 1) if defers else 0,
        "use_precision_aware_optimizer": narrow, "main_grads_dtype": draw.choice(("fp32", "bf16")) if narrow else "fp32",
        "main_params_dtype": draw.choice(("fp32", "fp16")) if narrow else "fp32",
        "exp_avg_dtype": draw.choice(("fp32", "bf16", "fp8")) if narrow else "fp32",
        "exp_avg_sq_dtype": draw.choice(("fp32", "fp16")) if narrow else "fp32",
    }  # fmt: skip


def _by_torchtitan(draw: Random, engines: Sequence[str]) -> JobSpec:
    """A job of torchtitan's own Llama 3 under FSDP2."""
    told = replace(
        recipe(draw, [name for name in engines if name == "fsdp2"]),
        zero_stage=3, precision="bf16-mixed", loss="full", keep_logits=False, attention="sdpa", kernels="cuda",
        offload_activations=False, sync_every_micro_batch=True, fsdp2=Fsdp2Options(reduce_dtype="fp32", modules="torchtitan"),
    )  # fmt: skip
    one = model(draw, ["llama"])
    shape = {
        "hidden_size": one.num_attention_heads * one.head_dim,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": None,
    }
    one = replace(one, **shape, tie_word_embeddings=False, unplaced_parameters=0)
    shards = MeshSpec(dp_shard=draw.choice((2, 8, 64, 1024)))
    return JobSpec(model=one, recipe=told, mesh=shards, batch=batch(draw, one), cluster=cluster(draw))


def _divided(draw: Random, engines: Sequence[str]) -> JobSpec:
    """A job of the papers' formulas with tensor parallelism."""
    told = recipe(draw, engines, manner="divided")
    tp = draw.choice((2, 4, 8))
    one = model(draw, ranks=tp)
    return JobSpec(model=one, recipe=told, mesh=mesh(draw, told, tp=tp), batch=batch(draw, one), cluster=cluster(draw))


def cluster(draw: Random) -> ClusterSpec:
    """No GPU, one from the catalogue, or one of another memory size."""
    many = draw.choice((None, 4, 8))
    if draw.randint(0, 3) < 3:
        return ClusterSpec(
            gpus_per_node=many, network_gbit_per_s=draw.choice((None, 100, 400)), nics_per_node=draw.choice((None, 1, 8))
        )
    card = gpu(draw.choice(gpu_names()))
    rates = [draw.uniform(0.001, 1) for _ in range(4)]
    shares = SharesSpec(
        matrices=rates[0], attention=rates[1], bandwidth=rates[2], stepping=rates[3], source=draw.choice(("a run", "another"))
    )
    return ClusterSpec(
        gpu=_mostly(draw, card, _of_another_size(draw, card)),
        gpus_per_node=many,
        shares=_mostly(draw, None, shares),
        network_gbit_per_s=draw.choice((None, 200)),
        nics_per_node=draw.choice((None, 4)),
    )


def _of_another_size(draw: Random, card: GpuSpec) -> GpuSpec:
    size = _about(draw, 10**9, 10**13)
    memory = replace(card.memory_bytes, value=size, check=draw.choice((None, {"bytes": float(size)})))
    return replace(card, memory_bytes=memory, network_link_bytes_per_s=draw.choice((None, card.network_link_bytes_per_s)))


Drawn = Callable[[Random, Sequence[str]], JobSpec]
#: Combinations of parallelism under FSDP2; pipelines with others are drawn less often, since their estimates take longer.
_SPLITS = tuple(
    manner
    for manner in _MANNERS
    if {*manner.split()} & {"tp", "cp", "ep", "pp"}
    for _ in range(2 if manner == "pp" or "pp" not in manner.split() else 1)
)
#: Every manner of training, its engines, and its weight in the draw.
_JOBS: tuple[tuple[Drawn, tuple[str, ...], int], ...] = (
    (_whole, ("ddp", "fsdp1", "fsdp2", "deepspeed", "paper"), 9), (_tuned, _MANNERS["lora"], 3), (_frozen, _MANNERS["frozen"], 2),
    (_profiled_job, _MANNERS["profile"], 1), (_split, ("fsdp2",), 7), (_by_megatron, ("megatron",), 2), (_divided, ("paper",), 1),
    (_by_torchtitan, ("fsdp2",), 1),
)  # fmt: skip


class Drawing(NamedTuple):
    """A job, and the specs' reason for refusing each earlier draw of the same seed."""

    job: JobSpec
    refused: tuple[str, ...]


def drawing(draw: Random, engines: Sequence[str] = ENGINES) -> Drawing:
    """A job of these engines; draws again if the specs refuse a draw."""
    there = [drawn for drawn, having, weight in _JOBS for _ in range(weight) if set(having) & set(engines)]
    refused = list[str]()
    while True:
        try:
            return Drawing(with_one_more(_with_more(draw, draw.choice(there)(draw, engines))), tuple(refused))
        except SpecError as error:
            refused.append(str(error))
        if len(refused) > _MOST:
            raise AssertionError(refused)


#: By family: vision tower, patch size in pixels, numbers per patch, and patches per side of a token.
_TOWERS = {"qwen2": ("qwen2_5_vl", 14, 1176, 2), "qwen3": ("qwen3_vl", 16, 1536, 2), "gemma3_text": ("siglip", 14, 588, 4)}
#: Llama's family, and those whose sizes are a Llama's too: a Llama 3.2 Vision is drawn instead.
_WITH_TILES = ("llama", "mistral", "ministral3", "smollm3", "seed_oss", "granite", "cwm")
_WITH_TOWERS = ("ddp", "fsdp1", "fsdp2", "deepspeed")


def _with_more(draw: Random, made: JobSpec) -> JobSpec:
    """The job, now and then with a vision tower, float8, or uneven routing."""
    model, told, often = made.model, made.recipe, not draw.randint(0, 3)
    if made.mesh.ep > 1 and often:
        return replace(made, recipe=replace(told, imbalance=draw.randint(100, 100 * min(3, made.mesh.ep)) / 100))
    plain = model.profile is None and model.adapter is None and model.frozen is None
    if not plain or not often:
        return made
    if told.engine in _WITH_TOWERS and (model.family in _TOWERS or not draw.randint(0, 4)):
        return replace(made, model=replace(model, vision=_vision(draw, model)))
    alone = told.fsdp2.modules == "transformers" and made.mesh.tp * made.mesh.cp * made.mesh.pp * made.mesh.ep == 1
    if told.engine in _WITH_TOWERS and model.family in _WITH_TILES and alone and draw.randint(0, 1):
        return _with_tiles(draw, made)
    if told.engine == "fsdp2" and model.family == "llama":
        return replace(made, recipe=replace(told, float8_recipe=draw.choice(("tensorwise", "rowwise"))))
    return made


def _vision(draw: Random, one: ModelSpec) -> VisionSpec:
    frozen = {"freeze_tower": not draw.randint(0, 1), "freeze_projector": not draw.randint(0, 2)}
    seen = {"images": draw.randint(0, 3), "image_width": draw.randint(100, 900), "image_height": draw.randint(100, 900)}
    if one.family not in _TOWERS:
        return VisionSpec(tower="other", other_parameters=draw.randint(1, 10**6), **frozen, **seen)
    tower, patch, numbers, merged = _TOWERS[one.family]
    heads, layers = draw.choice((2, 4)), draw.randint(1, 4)
    return VisionSpec(
        tower=tower, hidden_size=16 * heads * draw.randint(1, 4), intermediate_size=32 * draw.randint(2, 9),
        num_hidden_layers=layers, num_attention_heads=heads, patch_size=patch, patch_numbers=numbers, merge_size=merged,
        out_hidden_size=one.hidden_size, positions=0 if tower == "qwen2_5_vl" else 256,
        deeper=min(layers, draw.randint(0, 2)) if tower == "qwen3_vl" else 0, fixed_size=224 if tower == "siglip" else 0,
        **frozen, **seen,
    )  # fmt: skip


def _with_tiles(draw: Random, made: JobSpec) -> JobSpec:
    """The job with a Llama 3.2 Vision of that Llama's width."""
    cross, heads, layers = draw.randint(1, 4), draw.choice((2, 4)), draw.randint(1, 4)
    vision = VisionSpec(
        tower="mllama", hidden_size=16 * heads * draw.randint(1, 4), intermediate_size=32 * draw.randint(2, 9), images=1,
        num_hidden_layers=layers, num_attention_heads=heads, patch_size=14, patch_numbers=588, positions=17, fixed_size=56,
        out_hidden_size=made.model.hidden_size, global_layers=draw.randint(1, 3), cross_layers=cross,
        deeper=draw.randint(0, layers), freeze_text=not draw.randint(0, 1), recomputes=not draw.randint(0, 1),
        adapted=not draw.randint(0, 1), freeze_tower=not draw.randint(0, 1),
    )  # fmt: skip
    rows = made.model.head_rows or made.model.vocab_size
    text = replace(made.model, family="llama", sliding_window=None, num_hidden_layers=cross * draw.randint(2, 5))
    return replace(
        made,
        model=replace(text, vision=vision, head_rows=rows, tie_word_embeddings=False),
        recipe=replace(made.recipe, attention="sdpa", offload_activations=False, recompute_layers=None),
    )


#: Most refused draws in a row.
_MOST = 20


def job(draw: Random, engines: Sequence[str] = ENGINES) -> JobSpec:
    """The job of :func:`drawing`."""
    return drawing(draw, engines).job
