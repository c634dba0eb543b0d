"""Reads a job from YAML recipes of NeMo AutoModel, with keys and defaults of its components/ (docs/from-a-file.md)."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from zeroplan.catalog.setups.recipes import (
    NO_LENGTH,
    NOT_THEIR_MODULES,
    begun,
    flat,
    set_degrees,
    set_optimizer,
    set_sharded,
)
from zeroplan.catalog.setups.settings import Reading, Table
from zeroplan.catalog.setups.setup import Setting, Setup
from zeroplan.spec.adapter import HEAD, AdapterSpec
from zeroplan.spec.family import JOINING, LATENT_OF_EXPERTS
from zeroplan.spec.model import PREDICTS, ModelSpec
from zeroplan.spec.recipe import SENDING
from zeroplan.spec.traits import Layers

_AUTO_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "zerobubble": "interleaved-zero-bubble",
}
#: Values of AutoModel's backends (components/models/common/utils.py, BackendConfig) that are counted: attention kernels that save
#: what FlashAttention saves, linear layers that save their input, norms that save theirs and a number per row, and grouped products
#: that save theirs. Rotary positions save small tables; their fusion is switched off, whatever the file says. Empty: all values.
#: Compiled attention (``compile_attn``) of DeepSeek V3 and Qwen 3 keeps what counts without the compiler, to 1 %, and its backward
#: peaks up to 6 % lower: dry runs of models/deepseek_v3/layers.py, MLA, and qwen3_moe/layers.py. Other models ignore the key.
#: MagiAttention saves the same on one rank of a sequence (2c641357, functional/dist_attn.py, save_tensors_for_bwd).
_AUTO_BACKENDS: dict[str, tuple[object, ...]] = {
    "attn": ("te", "sdpa"), "linear": ("te", "torch", "quack"), "rms_norm": ("te", "torch", "torch_fp32", "quack"),
    "rope": ("torch", "quack"),
    "experts": ("gmm", "torch_mm", "te"), "dispatcher": ("deepep", "hybridep"), "rope_fusion": (), "dispatcher_num_sms": (),
    "dispatcher_share_token_dispatcher": (True,), "dispatcher_async_dispatch": (False,), "fake_balanced_gate": (),
    "fake_gate_noise": (), "compile_attn": (),
    "gate_precision": ("float32", "torch.float32"),
}  # fmt: skip
#: Of these, what chooses the kernels of experts and their router alone (components/moe/layers.py, MoE.__init__).
_AUTO_OF_EXPERTS = ("experts", "dispatcher", "dispatcher_num_sms", "dispatcher_share_token_dispatcher", "dispatcher_async_dispatch",
                    "fake_balanced_gate", "fake_gate_noise", "gate_precision")  # fmt: skip
#: Attention of DeepSeek V4 and Kimi (deepseek_v4/layers.py, kimi_k3/model.py), which have no formulas here, and of Kimi Linear,
#: where it is not counted (kimi_linear/model.py). AutoModel's other models ignore these values, or refuse them
#: (components/attention/utils.py, initialize_attn_module_and_func).
_AUTO_OF_REFUSED = ("torch", "eager")
_AUTO_BACKEND = "{}={}: what this part of AutoModel's own takes is not counted, and the answer may be too low"
#: Kernels of experts with the dispatcher torch (components/moe/layers.py, MoE.__init__; common/utils.py, BackendConfig).
_AUTO_GATHERING = {"torch": "looped-experts", "torch_mm": "grouped-experts", "te": "grouped-experts", "gmm": "grouped-experts"}
#: AutoModel's experts weight what they compute between their products, so they keep neither outputs nor halves of the gate.
#: Those in a loop (``torch``) are no less: each makes a gradient as large as all experts' weights.
_AUTO_ALONE = "{}={}: transformers' experts are counted, which keep more than AutoModel's"
#: models/glm_moe_dsa/layers.py, _dsa_kernel_backend: a query reads its picked keys, and no tensor has a score for each key.
_AUTO_SPARSE = "{}={}: transformers' attention over all keys is counted, which keeps its scores and takes more"


def automodel_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job in a recipe of NeMo AutoModel; raises SpecError for settings that are not modelled."""
    reading = begun(whole, folder)
    table = flat(reading)
    _auto_model(reading, whole)
    _auto_predictions(reading)
    ranks = _auto_degrees(reading, gpus)
    _auto_precision(reading)
    _auto_release(reading)
    each = _auto_pipeline(reading) or reading.number("micro_batch", "step_scheduler.local_batch_size", default=1) or 1
    key = "step_scheduler.global_batch_size"
    reading.set_steps(key, table.count(key), each * ranks)
    _auto_length(reading)
    again = _auto_recompute(reading)
    _auto_attention(reading)
    if _is_dion(reading):
        reading.set("optimizer", "optimizer._target_", "dion-muon")
    else:
        set_optimizer(reading, "optimizer._target_")
    _auto_te_adam(reading)
    _auto_flash_adam(reading)
    cut = table.last("loss_fn._target_") == "FusedLinearCrossEntropy"
    if cut:
        _auto_cut_loss(reading)
    if (
        not cut and "pipeline_parallel" not in reading.flags
    ):  # the output is a local of recipes/llm/train_ft.py, _forward_backward_step
        reading.set("keep_logits", "loss_fn._target_", value=True, filled=True)
    _auto_adapter(reading)
    reading.notes.append(NOT_THEIR_MODULES.format("AutoModel"))
    table.judge("automodel")
    _auto_float8(reading)
    _auto_compiled(reading)
    _auto_backend(reading, spread="expert_parallel" in reading.flags, again=again)
    _auto_deferred(reading)
    if not _auto_keeps_inputs(reading, again=again):
        reading.unmodelled(adds="*output_hidden_states")
    # NEFTune's noise is there while the embedding runs alone (components/training/neftune.py)
    table.like("ci.* benchmark.* _* *output_hidden_states neftune.*")
    return reading.setup("automodel")


_AT_ONCE = "the loss is counted with all logits at once, which takes more than AutoModel's"
_DOWNGRADED = (
    "AutoModel runs the loss over all logits: its pipeline returns hidden states only with patch_causal_lm_model "
    "(recipes/llm/train_ft.py, _maybe_downgrade_loss_fn)"
)


def _auto_cut_loss(reading: Reading) -> None:
    """Read Cut Cross-Entropy, which AutoModel replaces in some pipelines, and which is not modelled in others."""
    table = reading.table
    keys = table.like("*pipeline.patch_causal_lm_model")
    if "pipeline_parallel" in reading.flags and any(table.switch(key) is False for key in keys):
        reading.notes.append(_DOWNGRADED)
    elif "pipeline_parallel" in reading.flags:
        table.matters["loss_fn._target_"] = _AT_ONCE
        table.saves.add("loss_fn._target_")
    else:
        reading.set_cut_loss("loss_fn._target_")


def _auto_deferred(reading: Reading) -> None:
    """Read whether models with experts reduce gradients with the last micro-batch alone, as pipelines always do.

    Source: NeMo AutoModel 36044ad3, components/moe/fsdp_mixin.py, ``MoEFSDPSyncMixin.prepare_for_grad_accumulation``.
    """
    key, model = "model.backend.enable_fsdp_optimizations", reading.known_model()
    alone = reading.flags["engine"].value == "fsdp2" and "pipeline_parallel" not in reading.flags
    if reading.table.switch(key) and alone and model is not None and model.moe is not None:
        reading.set("sync_every_micro_batch", key, value=False)


def _auto_compiled(reading: Reading) -> None:
    """Read torch.compile. Where FSDP2's manager is asked for, its key ``enable_compile`` decides: ``compile.enabled`` is not read.

    Source: NeMo AutoModel 36044ad3, _transformers/infrastructure.py, ``apply_model_infrastructure``.
    """
    table = flat(reading)
    ignored = _strategy_of(reading) == "fsdp2" and any(key.startswith("distributed.") for key in table.data)
    for key in ("distributed.enable_compile", "compile.enabled"):
        if table.switch(key) and not (ignored and key == "compile.enabled"):
            reading.set_compiled(table, key)


def _auto_model(reading: Reading, whole: Table) -> None:
    """Read the model by its name, by the name of its configuration, or from a configuration of transformers in the file."""
    from zeroplan.catalog.config import model_from_config  # noqa: PLC0415  few files pay for it

    table = flat(reading)
    names = ("pretrained_model_name_or_path", "config.pretrained_model_name_or_path", "config.name_or_path", "config")
    named = next((f"model.{key}" for key in names if isinstance(table.get(f"model.{key}"), str)), None)
    if named is not None:
        reading.set_model(named, str(table.data[named]))
    elif of_class := re.fullmatch(r"transformers\.models\.(\w+)\.\w+\.\w+Config", str(table.data.get("model.config._target_"))):
        config = {key: value for key, value in whole.table("model").table("config").data.items() if key[:1] != "_"}
        made = model_from_config({**config, "model_type": of_class[1]}, name="the file's model.config")
        reading.set("model", "model.config", made)
        table.like("model.config.*")


def _auto_precision(reading: Reading) -> None:
    """Read the precision: weights keep the checkpoint's 16 bits unless torch_dtype says fp32 (_transformers/auto_model.py)."""
    table = reading.table
    word = str(table.get("model.torch_dtype") or table.get("model.config.torch_dtype") or "auto").rpartition(".")[2]
    kind = "bf16-mixed" if word in ("float32", "fp32") else "bf16"
    reading.set("precision", "model.torch_dtype", kind, also=("bf16-mixed",))


def _auto_release(reading: Reading) -> None:
    """Set the release of transformers that AutoModel pins for models whose routers a later one keeps in fp32.

    Source: NeMo AutoModel 003a9619, pyproject.toml.
    """
    model = reading.known_model()
    if model is not None and model.moe is not None and model.traits.wide_router == "since 5.24":
        reading.set("transformers", "model", "5.12", filled=True)


def _auto_recompute(reading: Reading) -> bool:
    """Read activation checkpointing; returns whether it is on for whole blocks."""
    table = reading.table
    own = "full" if table.get("parallelizer.activation_checkpointing") is True else None
    again = own or str(table.get("distributed.activation_checkpointing") or "false").lower()
    kinds = {"false": "none"}
    reading.set("recompute", "distributed.activation_checkpointing", kinds.get(again, "selective"), also=("full",))
    return again not in ("false", "selective")


def _auto_length(reading: Reading) -> None:
    """Read the tokens of a sequence, of packed ones or of the data's."""
    packed = reading.table.count("packed_sequence.packed_sequence_size", least=0)
    if packed:
        reading.set("seq_len", "packed_sequence.packed_sequence_size", packed)
    elif reading.number("seq_len", "dataset.seq_length", "dataset.seq_len", "dataset.max_length") is None:
        reading.notes.append(NO_LENGTH)


def _auto_attention(reading: Reading) -> None:
    """Read the attention kernel by what it saves: FlashAttention's tensors, or those of torch's."""
    words = [reading.table.get(f"model.{key}") for key in ("attn_implementation", "config._attn_implementation")]
    flash = "flash_attention_2" in words or _has_sinks(reading)
    reading.set("attention", "model.attn_implementation", "flash" if flash else "sdpa", filled=True)


def _is_dion(reading: Reading) -> bool:
    """Whether the optimizer is dion's Muon for the blocks' matrices, and AdamW for the rest (components/optim/dion.py)."""
    table = reading.table
    return table.get("optimizer._target_") == "dion.Muon" and table.get("optimizer.scalar_opt") in (None, "adamw")


_TE_STATES = "optimizer.{}={}: states of Transformer Engine's Adam are counted in fp32, the most they take"


def _auto_te_adam(reading: Reading) -> None:
    """Read Transformer Engine's Adam, whose states have 32 bits by default (d0067d0, pytorch/optimizers/fused_adam.py, FusedAdam).

    With ``store_param_remainders`` master weights are what 16-bit weights lack of fp32; fp32 weights get whole copies.
    """
    table = reading.table
    if not re.fullmatch(r"transformer_engine\.[\w.]*FusedAdam", str(table.data.get("optimizer._target_"))):
        return
    masters, remainders = (table.switch(f"optimizer.{key}") for key in ("master_weights", "store_param_remainders"))
    narrow = reading.flags["precision"].value == "bf16"
    kind = "" if not masters else "-remainders" if remainders and narrow else "-masters"
    reading.set("optimizer", "optimizer._target_", f"te-adam{kind}")
    reading.flags.pop("optimizer_impl", None)
    for key in ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"):
        value = table.get(f"optimizer.{key}")
        if str(value or "float32").rpartition(".")[2] != "float32":
            table.matters[f"optimizer.{key}"] = _TE_STATES.format(key, value)
            table.saves.add(f"optimizer.{key}")


def _auto_flash_adam(reading: Reading) -> None:
    """Read how many bits flashoptim's AdamW adds to 16-bit weights (components/optim/optimizer.py, FlashAdamWConfig)."""
    table = reading.table
    if reading.flags["optimizer"].value != "flash-adamw":
        return
    bits, _ = table.get("optimizer.master_weight_bits"), table.get("optimizer.compress_state_dict")
    if bits == 32:
        reading.set("optimizer", "optimizer.master_weight_bits", "flash-adamw-32bit")
    for key, bad in (
        ("quantize", table.switch("optimizer.quantize") is False),
        ("master_weight_bits", bits not in (None, 24, 32)),
    ):
        if bad:
            raise table.refused(f"optimizer.{key}")


def _auto_keeps_inputs(reading: Reading, *, again: bool) -> bool:
    """Whether every block's input is kept anyway, and its being held until the backward ends cannot raise the peak.

    The training loop holds ``out.hidden_states`` during the backward (recipes/llm/train_ft.py, _forward_backward_step).
    Checkpoints keep the inputs, and so do the norms of AutoModel's own models if all weights are trained. With several
    micro-batches the last backward begins with as many gradients as it ends with.
    """
    model = reading.known_model()
    if model is not None and model.predictions:  # returns the last alone, which is counted (nemotron_v3/model.py)
        return True
    steps = reading.flags.get("grad_accum", Setting("", 1)).value
    own = model is not None and model.has("automodel") and "lora_rank" not in reading.flags
    return (again or own) and int(str(steps)) > 1


_ONE_OF_FSDP2 = "{} on one GPU is counted as one rank of FSDP2, which takes more"


def _auto_alone(reading: Reading, strategy: str) -> None:
    """Count a job on one GPU as one rank of FSDP2 if its options are modelled under FSDP2 only.

    AutoModel itself does not wrap the model in FSDP2 on one GPU, so the real job takes less memory.
    """
    model = reading.known_model()
    predicts = model is not None and model.predictions > 0
    narrow = reading.table.switch("fp8.enabled") and (model is None or model.has("float8"))
    if strategy == "fsdp2" and (predicts or narrow or _is_dion(reading)) and reading.flags["engine"].value == "ddp":
        note = _ONE_OF_FSDP2.format("multi-token prediction" if predicts else "float8" if narrow else "dion's Muon")
        reading.set("engine", "distributed.strategy", "fsdp2", filled=True, note=note)
        reading.set("stage", "distributed.strategy", 3, filled=True)


def _strategy_of(reading: Reading) -> str:
    table = flat(reading)
    other = "megatron_fsdp" if "Megatron" in table.last("distributed._target_") else "fsdp2"
    return table.text("distributed.strategy") or other


def _auto_degrees(reading: Reading, gpus: int | None) -> int:
    """Read degrees, GPUs and engine; returns the data-parallel ranks."""
    table = flat(reading)
    tp, cp, pp, ep = set_degrees(reading, "distributed.", "tp_size", "cp_size", "pp_size", "ep_size")
    replicas = reading.degree("replicas", "distributed.dp_replicate_size")
    if tp > 1 and not table.switch("distributed.sequence_parallel"):  # its default (distributed/optimized_tp_plans.py)
        reading.options["fsdp2.sequence_parallel"] = Setting("distributed.sequence_parallel", value=False)
    split, dp = tp * cp * pp, table.data.get("distributed.dp_size")
    said = dp * split if isinstance(dp, int) and not isinstance(dp, bool) and dp > 0 else None
    nodes = table.count("benchmark.num_nodes") or table.count("ci.nodes") or (1 if "ci.nproc_per_node" in table.data else None)
    each = table.count("ci.nproc_per_node") or (4 if table.get("ci.cluster_tag") == "gb200" else 8)  # GPUs of a node
    gpus = said or table.count("launched_gpus") or gpus or (nodes * each if nodes else None)
    strategy = _strategy_of(reading)
    if strategy not in ("fsdp2", "ddp"):
        raise table.refused("distributed.strategy", "fsdp2 and ddp are modelled")
    # blocks of a pipeline, and of experts on their own ranks, stay gathered unless asked (distributed/config.py); the general key
    # comes first (_transformers/infrastructure.py)
    said, of_experts = (table.switch(f"distributed.{key}reshard_after_forward") for key in ("", "moe."))
    said = of_experts if said is None and ep > 1 else said
    stage = 0 if strategy == "ddp" else 2 if said is False or (said is None and (pp > 1 or ep > 1)) else 3
    set_sharded(reading, strategy, gpus, key="distributed.dp_size", ways=max(split * replicas, ep * pp), stage=stage)
    _auto_alone(reading, strategy)
    _auto_gathered(reading)
    return max(1, (gpus or split) // split)


def _auto_gathered(reading: Reading) -> None:
    """Read which blocks stay gathered and which are gathered ahead (distributed/parallelizer.py).

    Without a key for it, blocks are resharded after their forward, but for the last one. Models with experts are left out: their
    units are others (moe/parallelizer.py).
    """
    table, flags, model = flat(reading), reading.flags, reading.known_model()
    one_by_one = flags["engine"].value == "fsdp2" and flags["stage"].value == 3
    apart = {"pipeline_parallel", "expert_parallel"} & flags.keys() or (
        model is not None and (model.moe is not None or model.vision is not None or model.predictions)
    )
    depths = [table.count(f"distributed.fsdp2_{way}_prefetch_depth", least=0) for way in ("forward", "backward")]
    if not one_by_one or apart:
        reading.unmodelled(adds="distributed.enable_fsdp2_prefetch" if one_by_one else "")
        table.leave(("distributed.enable_fsdp2_prefetch",))  # nothing is gathered ahead where all stays gathered
        return
    if table.switch("distributed.reshard_after_forward") is None:
        reading.options["fsdp2.keeps_last"] = Setting("distributed.reshard_after_forward", value=True, filled=True)
    if table.switch("distributed.enable_fsdp2_prefetch"):
        ahead, below = (usual if one is None else one for one, usual in zip(depths, (1, 2), strict=True))
        for name, depth in (("forward_prefetch", ahead), ("backward_prefetch", max(1, below))):
            reading.options[f"fsdp2.{name}"] = Setting("distributed.enable_fsdp2_prefetch", depth)


def _auto_pipeline(reading: Reading) -> int | None:
    """Say schedule and micro-batches of a pipeline, which splits the local batch (pipelining/autopipeline.py); returns their size.

    Several runs of the pipeline per step are counted as one.
    """
    table = reading.table
    before = "autopipeline." if table.like("autopipeline.*") else "distributed.pipeline."  # its older name
    keys = [f"{before}{key}" for key in ("pp_schedule", "pp_microbatch_size", "layers_per_stage", "dtype", "pp_seq_len")]
    word = str(table.get(keys[0]) or "1f1b").lower().replace("_", "")
    table.leave((*keys[1:], f"{before}round_virtual_stages_to_pp_multiple"))
    if "pipeline_parallel" not in reading.flags:
        return None
    if word not in _AUTO_SCHEDULES:
        raise table.refused(keys[0], f"use one of {', '.join(_AUTO_SCHEDULES)}")
    reading.set("pipeline_schedule", keys[0], _AUTO_SCHEDULES[word], filled=keys[0] not in table.data)
    reading.layers_per_stage = table.count(keys[2]), str(table.get(f"{before}round_virtual_stages_to_pp_multiple") or "")
    table.get("step_scheduler.local_batch_size")
    return reading.number("micro_batch", keys[1], default=1)


#: Families of AutoModel's own models that build layers for multi-token prediction; of these, the counted one.
_PREDICTING, _COUNTED = ("qwen3_5_text", "qwen3_5_moe_text", "nemotron_h"), "nemotron_h"
_PREDICTIONS = (
    "model.num_nextn_predict_layers{}: AutoModel trains layers for multi-token prediction, which are not counted in this family: "
    "the answer is too low by them and by their loss"
)


def _auto_predictions(reading: Reading) -> None:
    """Add layers for multi-token prediction, of which a checkpoint has one depth (nemotron_v3/mtp.py, qwen3_5/model.py).

    Of the nemotron_h models, those whose experts have a latent have them, and Nemotron 3.5 Lightning. Other families ignore it.
    """
    table, model = reading.table, reading.known_model()
    if model is None:
        reading.unmodelled(adds="*num_nextn_predict_layers")
        return
    key, named = "model.num_nextn_predict_layers", str(reading.flags["model"].value)
    depth, repeats = table.data.get(key), table.switch("model.mtp_use_repeated_layer")
    latent = model.width_of_experts != model.hidden_size or "lightning" in named.lower()
    has_some = model.family in _PREDICTING and (model.family != _COUNTED or latent)
    depths = (1 if depth is None else table.count(key, least=0) or 0) if has_some else 0
    table.like("*.num_nextn_predict_layers")
    if depths and model.family != _COUNTED:
        table.matters[key] = _PREDICTIONS.format(" is not set" if depth is None else f"={depths}")
    elif depths:
        layers, pattern = model.num_hidden_layers + len(PREDICTS) * depths, model.letters + PREDICTS * depths
        ahead = replace(
            model, predictions=depths, predictor_repeats=bool(repeats), num_hidden_layers=layers, layer_pattern=pattern
        )
        reading.flags["model"] = reading.flags["model"]._replace(value=ahead)


def _auto_float8(reading: Reading) -> None:
    """Read torchao's float8 (components/quantization/fp8.py); rowwise_with_gw_hp makes one product of three in 16 bits."""
    table, model = reading.table, reading.known_model()
    if not table.switch("fp8.enabled"):
        return
    if reading.flags["engine"].value != "fsdp2" or (model is not None and not model.has("float8")):
        reading.unmodelled(either="fp8.enabled")
    if table.matters.get("fp8.enabled"):
        return
    name = str(table.get("fp8.recipe_name") or "tensorwise")
    reading.set("float8_recipe", "fp8.enabled", "rowwise" if name.startswith("rowwise") else "tensorwise")
    table.get("fp8.filter_fqns")
    reading.notes.append("float8 is counted for all linear layers of the blocks; filter_fqns is ignored")
    key = "fp8.enable_fsdp_float8_all_gather"
    if table.switch(key) and name == "tensorwise":  # a recipe of rows has its own settings instead
        reading.options["fsdp2.float8_all_gather"] = Setting(key, value=True)


def _auto_backend(reading: Reading, *, spread: bool, again: bool) -> None:
    """Read the kernels that ``model.backend`` chooses, and what AutoModel's checkpoints keep (:func:`zeroplan.resolve.resolve`).

    ``spread``: experts are on several ranks; ``again``: blocks are recomputed, except what their checkpoints keep.
    """
    table, parts = flat(reading), ["norm-in-one"]
    chosen = {key.rpartition(".")[2]: table.data[key] for key in table.like("model.backend.*") if key.count(".") == 2}
    chosen = {key: one for key, one in chosen.items() if key[:1] != "_" and not key.startswith("enable_") and one is not None}
    model = reading.known_model()
    none_routed = model is not None and model.moe is None
    chosen = {key: one for key, one in chosen.items() if not (none_routed and key in _AUTO_OF_EXPERTS)}
    own = spread or model is None or model.has("automodel")
    gathering = (
        _AUTO_GATHERING.get(str(chosen.get("experts") or "torch_mm")) if own and chosen.get("dispatcher") == "torch" else None
    )
    for key, one in chosen.items():
        counted, whole = _AUTO_BACKENDS.get(key), f"model.backend.{key}"
        if counted == () or one in (counted or ()) or (key == "attn" and _is_counted_attention(reading, one)):
            continue
        if gathering and key in ("experts", "dispatcher"):
            continue
        alone = key in ("experts", "dispatcher") and not spread and (key, one) != ("experts", "torch")
        sparse = key == "attn" and one in ("tilelang", "cudnn") and model is not None and model.family == "glm_moe_dsa"
        table.matters[whole] = (_AUTO_ALONE if alone else _AUTO_SPARSE if sparse else _AUTO_BACKEND).format(whole, one)
        table.saves.update([whole] * (alone or sparse))
    parts += ["output-copied", "output-scaled"] * (chosen.get("attn") == "flex" and _has_sinks(reading))
    sender = gathering or (str(chosen.get("dispatcher") or "deepep") if spread else "")
    if sender == "uccl_ep" and int(str(reading.flags["expert_parallel"].value)) <= PEERS:
        reading.notes.append(_UCCL)
        table.matters.pop("model.backend.dispatcher", None)
        sender = "deepep"
    parts += [sender] * (sender in SENDING)
    parts += ["inputs-kept"] * again + ["output-copied"] * (spread and chosen.get("attn") == "sdpa")
    parts += ["te-linear"] * (chosen.get("linear", "te") == "te") + ["te-experts"] * (
        spread and not gathering and chosen.get("experts") == "te"
    )
    parts += ["router-in-fp32"] * ("gate_precision" in chosen) + _auto_te_float8(reading, parts)
    reading.set("fused_kernels", "model.backend", ",".join([*parts, *_auto_loss(reading)]), filled=True)


def _auto_loss(reading: Reading) -> list[str]:
    """Return how the loss reads all logits (components/loss/): in their dtype, and of the whole vocabulary on every rank."""
    table, flags = flat(reading), reading.flags
    name, narrow = table.last("loss_fn._target_"), table.switch("loss_fn.fp32_upcast") is False
    under_autocast = flags["engine"].value == "ddp" and flags["precision"].value != "bf16"
    if "loss" in flags or under_autocast:
        return []
    if name == "TEParallelCrossEntropy":
        return ["in-place-loss"]
    return ["narrow-loss"] * narrow + ["gathered-logits"] * ("tensor_parallel" in flags)


#: Ranks of one node, within which UCCL-EP has DeepEP's buffers (moe/uccl_ep/_buffer.py, get_dispatch_config; buffer.py).
PEERS = 8
_UCCL = "UCCL-EP within a node is counted as DeepEP, whose buffers it has there (read, not run)"
_TE_FLOAT8 = (
    "{}: Transformer Engine's float8 was read (d0067d0), not run: copies of experts' weights are counted throughout, those of "
    "other weights until the backward, and a scale for 32 elements, the most that they take"
)


def _auto_te_float8(reading: Reading, parts: list[str]) -> list[str]:
    """Read float8 of Transformer Engine's layers (components/models/common/utils.py, TEFp8Config), counted in full training."""
    key = "model.backend.te_fp8.recipe"
    recipe, flags, model = reading.table.get(key), reading.flags, reading.known_model()
    if recipe is None or not {"te-linear", "te-experts"} & set(parts):
        return []
    counted = recipe in ("current", "block", "mxfp8") and flags["precision"].value == "bf16"
    if not counted or {"lora_rank", "tensor_parallel"} & flags.keys() or (model is not None and model.moe is None):
        reading.unmodelled(either=key)
        return []
    if recipe == "mxfp8":  # its own benchmark files give peaks that are 4 and 5 % higher, for reasons not found
        reading.unmodelled(adds=key)
    reading.notes.append(_TE_FLOAT8.format(key))
    return ["te-float8"]


def _is_counted_attention(reading: Reading, kernel: object) -> bool:
    """Whether attention with this kernel is counted in the file's model, beside those of ``_AUTO_BACKENDS``."""
    if kernel == "tilelang":  # also in GLM's sparse attention, where transformers' dense one is counted
        return "deepseek_v4" in str(reading.table.data.get("model.config._target_"))
    alone = kernel == "magi" and "context_parallel" not in reading.flags
    model = reading.known_model()
    refused = kernel in _AUTO_OF_REFUSED and (model is None or model.family != "kimi_linear")
    return alone or refused or (kernel == "flex" and _has_sinks(reading))


def _has_sinks(reading: Reading) -> bool:
    """Whether attention runs Transformer Engine's kernel or FlexAttention, both with sinks (models/gpt_oss/layers.py)."""
    model = reading.known_model()
    return model is not None and model.family == "gpt_oss"


def _auto_adapter(reading: Reading) -> None:
    table = reading.table
    rank, dropout = table.count("peft.dim"), table.get("peft.dropout")
    if rank is None:
        if table.data.get("peft._target_") is None:
            return
        rank = 8
    reading.set("lora_rank", "peft.dim", rank)
    _auto_targets(reading)
    reading.set("lora_dropout", "peft.dropout", str(dropout or "0").strip("0.") != "")
    if table.switch("quantization.load_in_4bit"):
        double = table.switch("quantization.bnb_4bit_use_double_quant")
        reading.set("quantize", "quantization.load_in_4bit", "nf4-double" if double else "nf4")


_OF_ITS_EXPERTS = (
    "{}: AutoModel gives all experts of a layer adapters of their own, which are modelled for models of the catalogue; "
    "--lora-targets attention counts those of attention alone"
)


def _auto_targets(reading: Reading) -> None:
    """Read the layers with adapters (_peft/module_matcher.py): by patterns of names, or all linear layers but some.

    Experts are one module of that name, which patterns alone can match; ``moe_rank_scaling`` lowers the rank of its adapters.
    """
    table = reading.table
    chosen, left_out = (_last_words(table.get(f"peft.{key}")) for key in ("target_modules", "exclude_modules"))
    if not chosen and not left_out and not table.switch("peft.match_all_linear"):
        chosen = ["*_proj"]
    model, scaled = reading.known_model(), table.switch("peft.moe_rank_scaling")
    has_experts = scaled if model is None else model.moe is not None
    of_experts = bool(has_experts) and any(fnmatchcase("experts", one) for one in chosen)
    if of_experts and model is None:
        reading.asks["lora_targets"] = _OF_ITS_EXPERTS.format("peft.target_modules")
        return
    names = _names_of_layers(model)
    if (
        reading.flags.get("loss", Setting("", "full")).value == "fused"
    ):  # reads the head's own weight (components/loss/utils.py)
        names = names[:-1]
    adapted = [name for name in names if any(fnmatchcase(name, one) for one in chosen or ["*"])]
    adapted = [name for name in adapted if not any(fnmatchcase(name, one) for one in left_out)]
    if model is None:
        wide = not chosen or any("*" in one or one in ("_proj", "proj", "") for one in chosen)
        adapted = ["all-linear", *(name for name in adapted if name == HEAD)] if wide else chosen
    reading.set("lora_targets", "peft.target_modules", ",".join(adapted) or "none")
    unlike = model is not None and (bool(model.traits.converted) or (not model.traits.adapted_output and "out_proj" in adapted))
    if model is not None and adapted and (of_experts or unlike):
        _auto_own_adapters(reading, model, tuple(adapted), of_experts=of_experts, scaled=bool(scaled))


def _auto_own_adapters(
    reading: Reading, model: ModelSpec, adapted: tuple[str, ...], *, of_experts: bool, scaled: bool
) -> None:  # fmt: skip
    """Give the model AutoModel's adapters where they differ from peft's: of experts, and of layers named as experts' once were."""
    rank, each = reading.flags["lora_rank"].value, model.moe.num_experts_per_tok if model.moe is not None and scaled else 1
    own = int(str(rank)) // each if of_experts else 0
    if of_experts and not own:
        raise reading.table.refused("peft.dim", f"AutoModel needs at least {each} with moe_rank_scaling")
    adapter = AdapterSpec(rank=int(str(rank)), targets=",".join(adapted), automodel=True, experts_rank=own)
    reading.flags["model"] = reading.flags["model"]._replace(value=replace(model, adapter=adapter))


def _last_words(said: object) -> list[str]:
    patterns = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    return [str(one).rpartition(".")[2] for one in patterns]


def _names_of_layers(model: ModelSpec | None) -> tuple[str, ...]:
    """Return the names of a model's linear layers: experts are none, so the MLP's are those of dense layers and shared experts."""
    if model is None:
        return (*Layers().every, HEAD)
    own = model.traits.layers
    others = [one for one in own.others if one not in LATENT_OF_EXPERTS or (model.moe is not None and model.moe.latent_size)]
    others = [one for one in others if one != JOINING or model.predictions]
    none_dense = model.moe is not None and not model.moe.num_shared_experts and not model.moe.num_dense_layers
    return (*others, *own.attention, *(() if none_dense else own.mlp), HEAD)
