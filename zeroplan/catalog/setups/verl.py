"""Reads a job from a verl configuration: its YAML, or the ``key=value`` arguments of a command.

Keys are those of the commit that docs/from-a-file.md lists (trainer/config/), with verl's defaults for keys left out. For PPO and
GRPO, the job is the actor's update.
"""

from pathlib import Path
from typing import Any

from zeroplan.catalog.setups.megatron_arguments import read_megatron, read_stages
from zeroplan.catalog.setups.settings import FILLED, LIGER, ULYSSES, FlatTable, Reading, Table, number_of
from zeroplan.catalog.setups.setup import Setting, Setup
from zeroplan.spec.recipe import LogProbs

_ACTOR, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
_UPDATE = (
    "only the actor's update is counted: reference, critic, reward model and rollout engine may take memory, too "
    "(`zeroplan workflow grpo`, `zeroplan workflow ppo`)"
)
_MOVED = (
    "what param_offload and optimizer_offload keep on the host returns to the GPU for the update, so that it is counted there"
)
_ENTROPY = f"{_ACTOR}entropy_coeff {_ACTOR}calculate_entropy"


def verl_setup(whole: Table, folder: Path, _: int | None) -> Setup:
    """Return the job in the file; raises SpecError for settings that are not modelled."""
    table = FlatTable(whole.data, whole.where)
    reading = Reading(table, folder)
    trains_a_policy = any(key.startswith("actor_rollout_ref.") for key in table.data)
    gpus = (table.count("trainer.n_gpus_per_node") or 8) * (table.count("trainer.nnodes") or 1)
    reading.set("gpus", "trainer.n_gpus_per_node", gpus, filled="trainer.n_gpus_per_node" not in table.data)
    named = next((key for key in (f"{_MODEL}path", "model.partial_pretrain", "model.path") if table.text(key)), None)
    if named is not None:
        reading.set_model(named, str(table.data[named]))
    table.leave(["optim"] * (table.data.get("optim") in ("fsdp", "megatron")))  # which of its files Hydra reads
    reading.set_frozen_tower(f"{_ACTOR}freeze_vision_tower")
    _policy(reading, gpus) if trains_a_policy else _supervised(reading, gpus)
    reading.set("attention", "attn_implementation", "flash", filled=True)
    reading.table.judge("verl")
    fused = reading.options.get("megatron.cross_entropy_fusion_impl", Setting("", "")).value == "verl"
    if fused or reading.flags.get("log_probs", Setting("", "")).value in ("chunks", "kernels"):
        for key in (f"{_MODEL}use_fused_kernels", f"{_MODEL}fused_kernel_options.impl_backend"):
            table.leave((key,))
            table.matters.pop(key, None)
            table.saves.discard(key)
    table.like("*engine_kwargs.* *metadata_kwargs.* *reward_kwargs.* *val_kwargs.* hydra.* config_path")
    return reading.setup("verl")


def _policy(reading: Reading, gpus: int) -> None:
    table = reading.table
    length = (table.count("data.max_prompt_length") or 512) + (table.count("data.max_response_length") or 512)
    ways = table.count(f"{_ACTOR}ulysses_sequence_parallel_size") or 1
    strategy = table.text(f"{_ACTOR}strategy") or table.text(f"{_ACTOR}fsdp_config.strategy")
    uses_megatron = strategy == "megatron" or "megatron" in str(table.get("config_name")) or (
        strategy is None and any(key.startswith(f"{_ACTOR}megatron.") for key in table.data)
    )  # fmt: skip
    ranks = read_megatron(reading, gpus, f"{_ACTOR}megatron.") if uses_megatron else gpus // ways
    if uses_megatron:
        _loss_on_megatron(reading)
        _adapters_on_megatron(reading)
        table.leave((f"{_MODEL}enable_gradient_checkpointing",))  # of FSDP's workers alone; Megatron has its own keys
        read_stages(reading, f"{_ACTOR}megatron.override_transformer_config.")
        reading.set("seq_len", "data.max_response_length", length)
    else:
        _fsdp(reading, f"{_ACTOR}fsdp_config.", str(table.get(f"{_ACTOR}strategy") or "fsdp"), gpus)
        _model(reading, _MODEL)
        _length(reading, "data.max_response_length", length, ways)
    split = int(str(reading.flags.get("context_parallel", Setting("", 1)).value)) if uses_megatron else ways
    each = _micro_batch(reading, length, split, ranks)  # ranks that split a sequence fill a dynamic batch together
    total = (table.count(f"{_ACTOR}ppo_mini_batch_size") or 256) * (table.count("actor_rollout_ref.rollout.n") or 1)
    reading.set_steps(f"{_ACTOR}ppo_mini_batch_size", total, each * max(1, ranks))
    is_read = not (uses_megatron or ways > 1 or gpus == 1) and table.text(f"{_ROLLOUT}name") in (None, "vllm")
    if not uses_megatron:
        reading.own_units = "verl"
        reading.set_log_probs("algorithm.adv_estimator", how=_log_probs(reading))
        _loop(reading, alone=not is_read)
    else:
        is_read = _loop_on_megatron(reading)
    if not is_read:
        reading.notes.append(_UPDATE)
    _rewards(reading, counted=is_read)
    parts = [f"{of}.{part}_offload" for of in ("fsdp_config", "megatron") for part in ("param", "optimizer", "grad")]
    if any(table.switch(f"{_ACTOR}{part}") for part in parts):
        reading.notes.append(_MOVED)


def _loss_on_megatron(reading: Reading) -> None:
    """Read the update's loss on Megatron-Core (workers/actor/megatron_actor.py). verl's fused kernels compute the entropy, too."""
    table = reading.table
    comm = f"{_ACTOR}megatron.override_transformer_config.overlap_moe_expert_parallel_comm"
    if table.switch(f"{_MODEL}use_fused_kernels") and not table.switch(comm):
        reading.options["megatron.cross_entropy_fusion_impl"] = Setting(f"{_MODEL}use_fused_kernels", "verl")
        table.like(_ENTROPY)
    else:
        table.read.discard(f"{_MODEL}use_fused_kernels")
        table.unmodelled(adds=_ENTROPY)


_ADAPTERS = "{}: adapters under Megatron-Core are not modelled; full training is counted, which takes more"


def _adapters_on_megatron(reading: Reading) -> None:
    """Note adapters on Megatron-Core (trainer/config/model/hf_model.yaml, lora)."""
    for key in (f"{_MODEL}lora.rank", f"{_MODEL}lora_rank"):
        if reading.table.count(key, least=0):
            reading.table.matters[key] = _ADAPTERS.format(key)
            reading.table.saves.add(key)


def _rewards(reading: Reading, *, counted: bool) -> None:
    """Read a reward model on the actor's GPUs: a second vLLM, or FSDP with parameters in host memory (workers/fsdp_workers.py)."""
    table, before = reading.table, "reward_model."
    if not table.switch(f"{before}enable") or table.switch(f"{before}enable_resource_pool"):
        return
    if table.switch(f"{before}use_reward_loop") is False:
        return
    if counted and table.text(f"{before}rollout.name") in (None, "vllm"):
        reading.loop["reward_engine"] = True
    else:
        table.matters[f"{before}enable"] = "reward_model.enable: an engine of its own on the same GPUs is not counted"


def _log_probs(reading: Reading) -> LogProbs:
    """Return how the update computes its loss (models/transformers/dense_common.py)."""
    table, entropy = reading.table, _has_entropy(reading)
    heads: dict[str | None, LogProbs] = {None: "chunks", "torch": "chunks", "triton": "kernels"}
    backend = table.text(f"{_MODEL}fused_kernel_options.impl_backend")
    if table.switch(f"{_MODEL}use_fused_kernels") and backend in heads and reading.flags["engine"].value != "ddp":
        return heads[backend]
    _sums_of_squares(reading)
    table.read.discard(f"{_MODEL}fused_kernel_options.impl_backend")
    return "entropy" if entropy else "in place"


def _sums_of_squares(reading: Reading) -> None:
    """Read the compiled sums of squared probabilities, whose graph, never run backward, holds the logits (actor/dp_actor.py)."""
    key = f"{_ACTOR}calculate_sum_pi_squared"
    if reading.table.switch(f"{_ACTOR}use_torch_compile") is not False and reading.table.switch(key):
        reading.set("keep_logits", key, value=True)
        reading.table.leave((f"{_ACTOR}sum_pi_squared_checkpointing",))
    else:
        reading.table.read.discard(key)


def _has_entropy(reading: Reading) -> bool:
    """Whether the update computes the entropy and its gradient, compiled (workers/actor/dp_actor.py); notes other ways to do so.

    Checkpoints of the compiled entropy save the same logits (entropy_checkpointing).
    """
    table = reading.table
    table.leave((f"{_ACTOR}entropy_checkpointing",))
    has_entropy = bool(table.switch(f"{_ACTOR}calculate_entropy")) or number_of(table.get(f"{_ACTOR}entropy_coeff"), 0) != 0
    compiled = table.switch(f"{_ACTOR}use_torch_compile") is not False
    chunked = table.switch(f"{_ACTOR}entropy_from_logits_with_chunking")
    if has_entropy and (chunked or not compiled):
        table.unmodelled(adds=_ENTROPY)
    return has_entropy


_ROLLOUT = "actor_rollout_ref.rollout."


def _loop(reading: Reading, *, alone: bool) -> None:
    """Read the PPO or GRPO loop with vLLM on the actor's GPUs (trainer/config/rollout/rollout.yaml); only ``gae`` has a critic.

    The actor's loss is counted as ``verl`` computes it (utils/torch_functional.py, logprobs_from_logits_flash_attn).
    """
    table = reading.table
    names = ("actor.fsdp_config.param_offload", "actor.fsdp_config.optimizer_offload", "actor.use_kl_loss",
             "actor.entropy_from_logits_with_chunking")  # fmt: skip
    params, states, kl_loss, chunked = (table.switch(f"actor_rollout_ref.{name}") or None for name in names)
    frees = table.switch(f"{_ROLLOUT}free_cache_engine")
    estimator = str(table.get("algorithm.adv_estimator") or "gae").rpartition(".")[2].lower()
    reading.set_loop(
        "algorithm.adv_estimator", "ppo", alone=alone, adv_estimator="gae" if estimator == "gae" else "grpo",
        vllm_gpu_memory_utilization=number_of(table.get(f"{_ROLLOUT}gpu_memory_utilization"), 0.5),
        vllm_tensor_parallel_size=table.count(f"{_ROLLOUT}tensor_model_parallel_size"),
        free_cache_engine="false" if frees is False else None, param_offload=params, optimizer_offload=states,
        use_kl_loss=kl_loss or table.switch("algorithm.use_kl_in_reward") or None, entropy_from_logits_with_chunking=chunked,
        log_prob_micro_batch_size_per_gpu=table.count(f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu"),
        **(_critic(reading) if estimator == "gae" else {}),
    )  # fmt: skip


def _loop_on_megatron(reading: Reading) -> bool:
    """Read the loop on Megatron-Core's workers; returns whether all of its phases are counted.

    A reference model, and a critic, stay on the GPU unless they are offloaded (workers/megatron_workers.py).
    """
    table, stays = reading.table, "{}.megatron.{}_offload"
    compares = table.switch(f"{_ACTOR}use_kl_loss") or table.switch("algorithm.use_kl_in_reward")
    key = stays.format("actor_rollout_ref.ref", "param")
    offloads = table.switch(key if key in table.data else f"{_ACTOR}megatron.param_offload")
    here = table.text(f"{_ROLLOUT}name") in (None, "vllm")
    between = all(table.switch(stays.format(_ACTOR[:-1], part)) for part in ("param", "optimizer"))
    if str(table.get("algorithm.adv_estimator") or "gae").rpartition(".")[2].lower() == "gae":
        return _loop_with_a_critic(reading, keeps_reference=bool(compares and not offloads), between=between, here=here)
    reading.set_loop(
        "algorithm.adv_estimator", "grpo", full_logits=True, keeps_reference=(compares and not offloads) or None,
        max_completion_length=table.count("data.max_response_length"), vllm_mode=None if here else "server",
        vllm_gpu_memory_utilization=number_of(table.get(f"{_ROLLOUT}gpu_memory_utilization"), 0.5) if here else None,
        vllm_tensor_parallel_size=(table.count(f"{_ROLLOUT}tensor_model_parallel_size") or 2) if here else None,
        offloads_between_updates=between or None,
        vllm_enable_sleep_mode=(here and table.switch(f"{_ROLLOUT}free_cache_engine") is not False) or None,
    )  # fmt: skip
    return here


def _loop_with_a_critic(reading: Reading, *, keeps_reference: bool, between: bool, here: bool) -> bool:
    """Read PPO on Megatron-Core's workers; returns whether all of its phases are counted.

    The critic has its own degrees, by default 1 (trainer/config/critic/megatron_critic.yaml). It is counted if it has
    the actor's layers, no ranks for experts, and is whole on the GPU or whole on the host between its phases.
    """
    table, before = reading.table, "critic.megatron."
    offloads = [table.switch(f"{before}{part}_offload") or False for part in ("param", "optimizer")]
    degrees = ("tensor_model", "pipeline_model", "context", "expert_model")
    tp, pp, cp, ep = (table.count(f"{before}{name}_parallel_size") or 1 for name in degrees)
    recomputed = (
        table.text(f"{before}override_transformer_config.recompute_granularity") == "full"
    )  # counted whole or not at all
    same = table.text("critic.model.path") in (None, table.text(f"{_MODEL}path"))
    if not (here and same and ep == 1 and len(set(offloads)) == 1) or "expert_parallel" in reading.flags:
        if not all(offloads):
            table.matters["algorithm.adv_estimator"] = "adv_estimator=gae: a critic stays on the GPU, and is not counted"
        return False
    own: dict[str, Any] = {**_critic(reading), "critic_recompute": "full" if recomputed else None}
    reading.set_loop(
        "algorithm.adv_estimator", "ppo", critic_ways=(tp, pp, cp), critic_stays=not offloads[0],
        keeps_reference=keeps_reference or None,
        vllm_gpu_memory_utilization=number_of(table.get(f"{_ROLLOUT}gpu_memory_utilization"), 0.5),
        vllm_tensor_parallel_size=table.count(f"{_ROLLOUT}tensor_model_parallel_size"),
        free_cache_engine="false" if table.switch(f"{_ROLLOUT}free_cache_engine") is False else None,
        offloads_between_updates=between or None, **own,
    )  # fmt: skip
    return True


def _critic(reading: Reading) -> dict[str, object]:
    """The critic's own batch and recomputation (trainer/config/critic/critic.yaml); its sequences are split as the actor's."""
    table, before = reading.table, "critic."
    own, actors = (table.count(f"{one}ulysses_sequence_parallel_size") or 1 for one in (before, _ACTOR))
    if own != actors:
        table.matters[f"{before}ulysses_sequence_parallel_size"] = f"critic: {own} Ulysses ranks; the workflow counts {actors}"
    keeps = table.switch(f"{before}model.enable_gradient_checkpointing") is False
    dynamic = table.switch(
        f"{before}use_dynamic_bsz" if f"{before}use_dynamic_bsz" in table.data else f"{_ACTOR}use_dynamic_bsz"
    )
    each, tokens = (table.count(f"{before}ppo_{one}_per_gpu") for one in ("micro_batch_size", "max_token_len"))
    return {
        "critic_micro_batch_size_per_gpu": None if dynamic else each,
        "critic_max_token_len_per_gpu": (tokens or 32768) * own if dynamic else None,
        "critic_recompute": "none" if keeps else "full",
    }


def _micro_batch(reading: Reading, length: int, ways: int, ranks: int) -> int:
    table, key = reading.table, f"{_ACTOR}ppo_micro_batch_size_per_gpu"
    tokens = (table.count(f"{_ACTOR}ppo_max_token_len_per_gpu") or 16384) * ways
    whole = table.count(f"{_ACTOR}ppo_micro_batch_size")
    each = table.count(key) or (1 if whole is None else max(1, whole // max(1, ranks)))
    if table.switch(f"{_ACTOR}use_dynamic_bsz"):
        each, key = max(1, -(-tokens // length)), f"{_ACTOR}ppo_max_token_len_per_gpu"
        reading.notes.append(FILLED.format(tokens))
    reading.set("micro_batch", key, each, filled=key not in table.data and whole is None)
    return each


def _supervised(reading: Reading, gpus: int) -> None:
    table = reading.table
    ways = table.count("ulysses_sequence_parallel_size") or table.count("engine.ulysses_sequence_parallel_size") or 1
    length = table.count("data.max_length") or 1024
    each = reading.number("micro_batch", "data.micro_batch_size_per_gpu", "data.micro_batch_size", default=4) or 1
    reading.set_steps("data.train_batch_size", table.count("data.train_batch_size") or 256, each * max(1, gpus // ways))
    _fsdp(reading, "model.fsdp_config.", str(table.get("engine.strategy") or table.get("model.strategy") or "fsdp2"), gpus)
    _model(reading, "model.")
    _length(reading, "data.max_length", length, ways)


def _length(reading: Reading, key: str, length: int, ways: int) -> None:
    reading.set("seq_len", key, -(-length // ways), note=ULYSSES if ways > 1 else "")


def _fsdp(reading: Reading, before: str, strategy: str, gpus: int) -> None:
    """Read FSDP: by default weights in fp32, compute in bf16, reduce-scatters in fp32 (workers/fsdp_workers.py)."""
    table, version = reading.table, "fsdp2" if strategy == "fsdp2" else "fsdp1"
    table.get(f"{_ACTOR}fsdp_config.strategy")
    size = table.count(f"{before}fsdp_size", least=-1) or -1
    if 0 < size < gpus and gpus % size == 0:
        version = "fsdp2"
        reading.set("replicas", f"{before}fsdp_size", gpus // size)
    version = version if gpus > 1 else "ddp"  # one rank has no one to shard with
    reading.set("engine", "strategy", version, also=("fsdp1", "fsdp2"))
    keeps = table.switch(f"{before}reshard_after_forward") is False
    reading.set("stage", f"{before}reshard_after_forward", 0 if gpus == 1 else 2 if keeps else 3)
    dtype = table.text(f"{before}model_dtype") or "fp32"
    reduced = table.text(f"{before}mixed_precision.reduce_dtype") or "fp32"
    table.like(f"{before}mixed_precision.* {before}dtype")
    reading.set("precision", f"{before}model_dtype", "bf16" if dtype in ("bf16", "bfloat16") else "bf16-mixed")
    if dtype not in ("bf16", "bfloat16") and gpus > 1:
        reading.options[f"{version}.reduce_dtype"] = Setting(
            "reduce_dtype", "fp32" if reduced in ("fp32", "float32") else "param"
        )
    reading.set("optimizer", "optim.optimizer", "adamw", filled=True)


def _model(reading: Reading, before: str) -> None:
    table = reading.table
    recomputes = table.switch(f"{before}enable_gradient_checkpointing") is not False
    reading.set("recompute", f"{before}enable_gradient_checkpointing", "full" if recomputes else "none")
    rank = next((found for key in ("lora_rank", "lora.rank") if (found := table.count(f"{before}{key}", least=0))), 0)
    if table.switch(
        f"{before}use_liger"
    ):  # workers/fsdp_workers.py: Liger's own loss needs labels, which the model does not get
        reading.set_liger(*LIGER, key=f"{before}use_liger", loss=False)
    targets = table.get(f"{before}target_modules") or table.get(f"{before}lora.target_modules")
    if rank:
        reading.set("lora_rank", f"{before}lora_rank", rank)
        names = (
            targets if isinstance(targets, str) else ",".join(map(str, targets)) if isinstance(targets, list) else "all-linear"
        )
        reading.set("lora_targets", f"{before}target_modules", names.strip("[]").replace("'", "").replace('"', ""))
        reading.set("lora_dropout", f"{before}lora_dropout", value=False, filled=True)
