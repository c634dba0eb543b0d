"""Which key of the user's configuration file makes a suggested change of the job, and with which value?"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.spec.job import JobSpec

if TYPE_CHECKING:
    from zeroplan.catalog.setups.setup import Kind

_Value = object


class Changed(NamedTuple):
    """One field of a job with its new value, such as ``recipe.recompute`` or ``deepspeed.offload_optimizer``."""

    name: str
    value: _Value


def changed(before: JobSpec, after: JobSpec) -> tuple[Changed, ...]:
    """Return every field that differs, with each option of an engine as its own field."""
    found: list[Changed] = []
    for part in ("recipe", "mesh", "batch"):
        old, new = getattr(before, part), getattr(after, part)
        for field in fields(old):
            one, other = getattr(old, field.name), getattr(new, field.name)
            if one == other:
                continue
            if field.name in ("ddp", "fsdp1", "fsdp2", "deepspeed"):
                found += [
                    Changed(f"{field.name}.{option.name}", getattr(other, option.name))
                    for option in fields(one)
                    if getattr(one, option.name) != getattr(other, option.name)
                ]
            else:
                found.append(Changed(f"{part}.{field.name}", other))
    return tuple(found)


def in_its_words(
    before: JobSpec, after: JobSpec, kind: "Kind", keys: Mapping[str, str], deepspeed: str = ""
) -> tuple[str, ...]:
    """Return the keys to change with their values, in the file's syntax; settings without a key refer to the training script.

    ``keys``: the file's keys by flag, for flags with several possible keys; ``deepspeed``: the place of DeepSpeed's keys, from
    :func:`deepspeed_place`.
    """
    words = _Words(before, after, keys, deepspeed)
    found_words: list[str] = []
    for one in changed(before, after):
        said = _BY_KIND.get(kind, {}).get(one.name) or _IN_SCRIPT.get(one.name)
        found_words += (
            said(words, one.value)
            if said is not None
            else [f"in the training script: {one.name.partition('.')[2]} {one.value}"]
        )
    return tuple(dict.fromkeys(found_words))


class _Words(NamedTuple):
    before: JobSpec
    after: JobSpec
    keys: Mapping[str, str]
    deepspeed: str

    def key(self, flag: str, otherwise: str) -> str:
        """Return the file's own key for a flag, or else the given one."""
        return self.keys.get(flag, otherwise)


_Said = Callable[[_Words, _Value], list[str]]


def _json(key: str) -> _Said:
    return lambda _, value: [f'"{key}": {json.dumps(value)}']


def _yaml(key: str) -> _Said:
    return lambda _, value: [f"{key}: {_plain(value)}"]


def _toml(key: str) -> _Said:
    return lambda _, value: [f"{key} = {json.dumps(value)}"]


def _plain(value: _Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _script(text: str) -> _Said:
    return lambda _, value: [f"in the training script: {text.format(value=value)}"]


def _nothing(_: _Words, __: _Value) -> list[str]:
    return []


#: Fields that most files have no key for.
_IN_SCRIPT: dict[str, _Said] = {
    "recipe.reentrant": _nothing,
    "recipe.padded": _nothing,  # follows from the micro-batch
    "recipe.attention": _script('attn_implementation="{value}"'),
    "recipe.linear_attention": _nothing,  # follows from the installed packages
    "recipe.loss": _script("head and loss in one kernel, Liger's fused linear cross-entropy"),
    "recipe.keep_logits": _script("free the model's output before the backward"),
    "recipe.sync_every_micro_batch": _script("GradientAccumulationPlugin(num_steps=..., sync_each_batch=True)"),
    "recipe.optimizer_impl": _script("torch.optim.AdamW(..., {value}=True)"),
    "recipe.optimizer": _script("the optimizer {value}"),
    "recipe.offload_activations": _script("torch's offload_wrapper around every block"),
    "batch.seq_len": _script("sequences of {value} tokens"),
    "batch.micro_batch_size": _script("{value} sequences at a time"),
    "batch.grad_accum_steps": _script("gradients of {value} micro-batches per step"),
    "ddp.gradient_as_bucket_view": _script("DistributedDataParallelKwargs(gradient_as_bucket_view=True)"),
    "ddp.bucket_cap_mb": _script("DistributedDataParallelKwargs(bucket_cap_mb={value})"),
    "ddp.find_unused_parameters": _script("DistributedDataParallelKwargs(find_unused_parameters={value})"),
    "ddp.static_graph": _script("DistributedDataParallelKwargs(static_graph={value})"),
    "ddp.wrap_one_rank": _script("DistributedDataParallel around the model of a single GPU"),
    **dict.fromkeys(
        ("ddp.step_in_backward", "fsdp2.step_in_backward"),
        _script("an optimizer for every weight, called by register_post_accumulate_grad_hook"),
    ),
    "fsdp2.reduce_dtype": _script("MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"),
    "mesh.dp_shard": lambda words, _: [f"started on {words.after.mesh.world_size} GPUs"]
    if words.after.mesh.world_size != words.before.mesh.world_size else [],
}  # fmt: skip


def _recomputed(_: _Words, value: _Value) -> list[str]:
    if value == "full":
        return ["in the training script: model.gradient_checkpointing_enable()"]
    return [f"in the training script: recomputation {value}, which no key of the file sets"]


# DeepSpeed

#: accelerate's section with a few of DeepSpeed's keys.
_SECTION = "deepspeed_config"


def deepspeed_place(where: str) -> str:
    """Return the place of DeepSpeed's keys, as a prefix for them, from the configuration's name in errors.

    >>> deepspeed_place("DeepSpeed configuration 'here/ds_config.json'"), deepspeed_place("TrainingArguments 'a.json': deepspeed")
    ('in ds_config.json: ', 'deepspeed.')
    """
    named, _, section = where.rpartition("': ")
    if named:
        return _SECTION if section == _SECTION else f"{section}."
    return f"in {PurePath(where.partition(chr(39))[2].rstrip(chr(39))).name}: "


def _deepspeed_batch(key: str, flag: str) -> _Said:
    def said(words: _Words, value: _Value) -> list[str]:
        if words.deepspeed == _SECTION and flag == "grad_accum":
            return [f"deepspeed_config.gradient_accumulation_steps: {value}"]
        if words.before.recipe.engine != "deepspeed" or words.deepspeed == _SECTION:
            return _IN_SCRIPT["batch.micro_batch_size" if flag == "micro_batch" else "batch.grad_accum_steps"](words, value)
        return _deepspeed_option(key)(words, value)

    return said


def _deepspeed_option(key: str) -> _Said:
    """Return the writer of a DeepSpeed key: with accelerate's name in accelerate's section, else with DeepSpeed's."""
    section, _, option = key.rpartition(".")
    inline = {"stage": "zero_stage", "device": f"{section.rpartition('.')[2]}_device"}

    def said(words: _Words, value: _Value) -> list[str]:
        if words.deepspeed == _SECTION and option in inline:
            return [f"deepspeed_config.{inline[option]}: {_plain(value)}"]
        if words.deepspeed == _SECTION:
            return [f'in a DeepSpeed configuration of its own (deepspeed_config_file): "{key}": {json.dumps(value)}']
        if words.deepspeed.startswith("in "):
            return [f'{words.deepspeed}"{key}": {json.dumps(value)}']
        return [f'"{words.deepspeed}{key}": {json.dumps(value)}']

    return said


def _zero_options() -> Iterator[tuple[str, _Said]]:
    from zeroplan.spec.recipe import DeepSpeedOptions  # noqa: PLC0415  keeps start-up fast

    for field in fields(DeepSpeedOptions):
        name = field.name
        for part in ("offload_optimizer", "offload_param"):
            if name == part:
                yield f"deepspeed.{name}", _deepspeed_option(f"zero_optimization.{part}.device")
                break
            if name.startswith(part):
                yield f"deepspeed.{name}", _deepspeed_option(f"zero_optimization.{part}.{name.removeprefix(part + '_')}")
                break
        else:
            yield f"deepspeed.{name}", _deepspeed_option(f"zero_optimization.{name}")


_ZERO: dict[str, _Said] = {
    **dict(_zero_options()),
    "deepspeed.zero_init": _script("zero_init {value}"),
    "deepspeed.torch_adam": _deepspeed_option("optimizer.params.torch_adam"),
}
_DEEPSPEED: dict[str, _Said] = {
    **_ZERO,
    "recipe.zero_stage": _deepspeed_option("zero_optimization.stage"),
    "recipe.recompute": _recomputed,
    "batch.micro_batch_size": _json("train_micro_batch_size_per_gpu"),
    "batch.grad_accum_steps": _json("gradient_accumulation_steps"),
}


# accelerate


def _sharding(yes: str, no: str) -> _Said:
    """Return the writer of a ZeRO stage: FSDP2's key for resharding, or DeepSpeed's stage."""

    def said(words: _Words, value: _Value) -> list[str]:
        if words.after.recipe.engine == "deepspeed":
            return _deepspeed_option("zero_optimization.stage")(words, value)
        if words.after.recipe.engine != "fsdp2":
            return ["in the training script: torch's ZeroRedundancyOptimizer"] if value == 1 else []
        return [yes if value == 3 else no]

    return said


def _accelerate_recomputes(words: _Words, value: _Value) -> list[str]:
    if words.after.recipe.engine == "fsdp2" and value == "full":
        return ["fsdp_config.fsdp_activation_checkpointing: true"]
    return _recomputed(words, value)


def _accelerate_engine(_: _Words, value: _Value) -> list[str]:
    if value == "fsdp2":
        return [
            "distributed_type: FSDP",
            "fsdp_config.fsdp_version: 2",
            "fsdp_config.fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        ]
    return [f"distributed_type: {'DEEPSPEED' if value == 'deepspeed' else 'MULTI_GPU'}"]


def _accelerate_shards(words: _Words, value: _Value) -> list[str]:
    before, after = words.before.mesh, words.after.mesh
    processes = [f"num_processes: {after.world_size}"] if after.world_size != before.world_size else []
    shards = [f"parallelism_config.parallelism_config_dp_shard_size: {value}"] if before.dp_replicate > 1 else []
    return [*processes, *shards]


_ACCELERATE: dict[str, _Said] = {
    **_ZERO,
    "recipe.engine": _accelerate_engine,
    "recipe.zero_stage": _sharding(
        "fsdp_config.fsdp_reshard_after_forward: true", "fsdp_config.fsdp_reshard_after_forward: false"
    ),
    "recipe.recompute": _accelerate_recomputes,
    "batch.micro_batch_size": _deepspeed_batch("train_micro_batch_size_per_gpu", "micro_batch"),
    "batch.grad_accum_steps": _deepspeed_batch("gradient_accumulation_steps", "grad_accum"),
    "recipe.offload_activations": _yaml("fsdp_config.fsdp_activation_checkpointing_offload"),
    "fsdp2.cpu_offload": _yaml("fsdp_config.fsdp_offload_params"),
    "mesh.dp_replicate": _yaml("parallelism_config.parallelism_config_dp_replicate_size"),
    "mesh.dp_shard": _accelerate_shards,
}


# transformers' Trainer


def _trainer_recomputes(words: _Words, value: _Value) -> list[str]:
    if value != "full":
        return _recomputed(words, value)
    fsdp = words.after.recipe.engine == "fsdp2"
    return ['"fsdp_config": {"activation_checkpointing": true}' if fsdp else '"gradient_checkpointing": true']


def _optim_name(words: _Words) -> str:
    recipe = words.after.recipe
    names = {
        "adamw-8bit": "adamw_bnb_8bit",
        "torchao-adamw-8bit": "adamw_torch_8bit",
        "torchao-adamw-4bit": "adamw_torch_4bit",
        "adamw": "adamw_torch_fused" if recipe.optimizer_impl == "fused" else "adamw_torch",
    }
    return names.get(recipe.optimizer, recipe.optimizer.replace("-", "_"))


def _optim(words: _Words, _: _Value) -> list[str]:
    return [f'"optim": "{_optim_name(words)}"']


def _trainer_engine(_: _Words, value: _Value) -> list[str]:
    return ['"fsdp": true', '"fsdp_config": {"version": 2}'] if value == "fsdp2" else []


def _seq_len(otherwise: str, sign: str) -> _Said:
    def said(words: _Words, value: _Value) -> list[str]:
        key = words.key("seq_len", otherwise)
        return [f'"{key}": {value}'] if sign == ":" else [f"{key} = {value}"]

    return said


_TRAINER: dict[str, _Said] = {
    **_ZERO,
    "recipe.engine": _trainer_engine,
    "recipe.zero_stage": _sharding(
        '"fsdp_config": {"reshard_after_forward": true}', '"fsdp_config": {"reshard_after_forward": false}'
    ),
    "recipe.recompute": _trainer_recomputes,
    "recipe.optimizer": _optim,
    "recipe.optimizer_impl": _optim,
    "recipe.attention": _json("attn_implementation"),
    "recipe.loss": lambda *_: ['"use_liger_kernel": true (which replaces more than the loss)'],
    "recipe.sync_every_micro_batch": lambda *_: [
        '"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
    ],
    "fsdp2.cpu_offload": lambda *_: ['"fsdp_config": {"cpu_offload": true}'],
    "batch.micro_batch_size": _json("per_device_train_batch_size"),
    "batch.grad_accum_steps": _json("gradient_accumulation_steps"),
    "batch.seq_len": _seq_len("max_length", ":"),
    "mesh.dp_replicate": _json("parallelism_config.dp_replicate_size"),
}


# LLaMA-Factory and Axolotl, which run on the Trainer


def _on_the_trainer(recomputed: str, kept: str, optimizer: str, micro_batch: str, length: str) -> dict[str, _Said]:
    """Return the writers for a YAML file of a program that uses the Trainer, with its keys and lines for recomputation."""
    lines = {"full": [recomputed], "none": [kept]}
    return {
        **_ZERO,
        "recipe.engine": lambda _, value: (
            ["fsdp: [full_shard, auto_wrap]", "fsdp_config.version: 2"] if value == "fsdp2" else []
        ),
        "recipe.zero_stage": _sharding("fsdp_config.reshard_after_forward: true", "fsdp_config.reshard_after_forward: false"),
        "recipe.recompute": lambda words, value: lines.get(str(value)) or _recomputed(words, value),
        "recipe.optimizer": lambda words, _: [f"{optimizer}: {_optim_name(words)}"],
        "recipe.optimizer_impl": lambda words, _: [f"{optimizer}: {_optim_name(words)}"],
        "batch.grad_accum_steps": _yaml("gradient_accumulation_steps"),
        "batch.micro_batch_size": _yaml(micro_batch),
        "batch.seq_len": _yaml(length),
    }


_LLAMA_FACTORY = {
    **_on_the_trainer("disable_gradient_checkpointing: false", "disable_gradient_checkpointing: true", "optim",
                      "per_device_train_batch_size", "cutoff_len"),
    "recipe.loss": lambda *_: ["enable_liger_kernel: true (which replaces more than the loss)"],
    "fsdp2.cpu_offload": _yaml("fsdp_config.cpu_offload"),
}  # fmt: skip
_AXOLOTL = {
    **_on_the_trainer("gradient_checkpointing: true", "gradient_checkpointing: false", "optimizer", "micro_batch_size",
                      "sequence_len"),
    "recipe.loss": lambda *_: ["liger_fused_linear_cross_entropy: true"],
    "recipe.attention": lambda _, value: [f"attn_implementation: {'flash_attention_2' if value == 'flash' else value}"],
    "fsdp2.cpu_offload": _yaml("fsdp_config.offload_params"),
    "mesh.dp_replicate": _yaml("dp_replicate_size"),
}  # fmt: skip


# torchtitan


def _titan_recomputes(_: _Words, value: _Value) -> list[str]:
    if value == "selective":
        return ['activation_checkpoint.mode = "selective"', 'activation_checkpoint.selective_ac_option = "op"']
    return [f'activation_checkpoint.mode = "{value}"']


def _titan_batch(words: _Words, value: _Value) -> list[str]:
    if words.after.mesh.pp > 1:
        return [f"parallelism.pipeline_parallel_microbatch_size = {value}"]
    key = words.key("micro_batch", "training.local_batch_size")
    if key.endswith("dp_rank"):
        return [f"{key} = {words.after.batch.micro_batch_size * words.after.batch.seq_len}"]
    return [f"{key} = {value}"]


def _titan_total(words: _Words, _: _Value) -> list[str]:
    batch, mesh = words.after.batch, words.after.mesh
    if mesh.pp > 1:
        return [f"training.local_batch_size = {batch.micro_batch_size * batch.grad_accum_steps}"]
    return [
        f"training.global_batch_size = {batch.micro_batch_size * batch.grad_accum_steps * mesh.dp_shard * mesh.dp_replicate}"
    ]


_TORCHTITAN: dict[str, _Said] = {
    "recipe.engine": _nothing,
    "recipe.zero_stage": _sharding(
        'parallelism.fsdp_reshard_after_forward = "always"', 'parallelism.fsdp_reshard_after_forward = "never"'
    ),
    "recipe.recompute": _titan_recomputes,
    "recipe.optimizer_impl": _toml("optimizer.implementation"),
    "fsdp2.cpu_offload": _toml("training.enable_cpu_offload"),
    "batch.micro_batch_size": _titan_batch,
    "batch.grad_accum_steps": _titan_total,
    "batch.seq_len": _seq_len("training.seq_len", "="),
    "mesh.dp_replicate": _toml("parallelism.data_parallel_replicate_degree"),
    "mesh.dp_shard": _toml("parallelism.data_parallel_shard_degree"),
}

_BY_KIND: "dict[Kind, dict[str, _Said]]" = {
    "deepspeed": _DEEPSPEED,
    "accelerate": _ACCELERATE,
    "trainer": _TRAINER,
    "torchtitan": _TORCHTITAN,
    "llama-factory": _LLAMA_FACTORY,
    "axolotl": _AXOLOTL,
}
