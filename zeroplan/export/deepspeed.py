"""Writes a job as DeepSpeed's configuration (0.18, 0.19); ``--deepspeed-config`` reads it back."""

from dataclasses import asdict

from zeroplan.catalog.deepspeed_config import OF_THE_SCRIPT, OWN_SECTION
from zeroplan.resolve import OPTIONS
from zeroplan.resolve.options import value_of
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import ADAM, RecipeSpec

_OFFLOADED = ("offload_optimizer", "offload_param")
#: zeroplan's DeepSpeed options that are not keys of ``zero_optimization``.
_OURS = ("grad_accum_dtype", "torch_adam", "zero_init", "flatten_on_accelerator", "gpus_per_node")
#: Keys that DeepSpeed 0.18 refuses as unknown. They are written only if they differ from the default.
_LATE: dict[str, object] = {"compute_grad_norm": True, "stage3_allgather_sequential": False}

_PRECISIONS: dict[str, dict[str, object]] = {
    "bf16-mixed": {"bf16": {"enabled": True}},
    "fp16-mixed": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
}


def configuration(job: JobSpec, *, nvme_path: str | None = None) -> dict[str, object]:
    """Return the configuration of a job: batch, precision and ``zero_optimization``, without an optimizer."""
    recipe = job.recipe
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": job.batch.micro_batch_size,
        "gradient_accumulation_steps": job.batch.grad_accum_steps,
        "zero_optimization": {"stage": recipe.zero_stage, **_zero(recipe, nvme_path)},
        "gradient_clipping": 1.0 if recipe.deepspeed.compute_grad_norm else 0.0,
    }
    if recipe.deepspeed.grad_accum_dtype == "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config | _PRECISIONS.get(recipe.precision, {})


def with_optimizer(job: JobSpec) -> dict[str, object]:
    """Return the configuration with an optimizer that DeepSpeed builds, for Adam, AdamW and Muon; scripts build other optimizers.

    The learning rate is left out, so DeepSpeed uses the optimizer's default.
    """
    config, recipe = configuration(job), job.recipe
    config[OWN_SECTION] = of_the_script(job)
    if recipe.optimizer == "muon":
        return {**config, "optimizer": {"type": "Muon", "params": {}}}
    if recipe.optimizer not in ADAM:
        return {**config, "zero_allow_untested_optimizer": True}
    kind = {"adam": "Adam", "adamw": "AdamW"}[recipe.optimizer]
    return {**config, "optimizer": {"type": kind, "params": _adam_params(recipe)}}


def of_the_script(job: JobSpec) -> dict[str, object]:
    """Return the settings of the training script that DeepSpeed has no keys for, by the name of their flag.

    DeepSpeed 0.19.8 checks only the sections that it knows (runtime/config.py, DeepSpeedConfig), so that it passes over these.
    """
    values = {name: value_of(job, OPTIONS[name]) for name in OF_THE_SCRIPT}
    default = RecipeSpec()
    own = {"seq_len": job.batch.seq_len, "optimizer": None if job.recipe.optimizer in (*ADAM, "muon") else job.recipe.optimizer}
    differ = {name: value for name, value in values.items() if value != getattr(default, name, None)}
    return {name: value for name, value in {**differ, **own}.items() if value is not None}


def _adam_params(recipe: RecipeSpec) -> dict[str, object]:
    """Return the parameters that select torch's Adam and its implementation; none for DeepSpeed's own."""
    if recipe.optimizer_impl is None:
        return {"torch_adam": True} if recipe.deepspeed.torch_adam else {}
    if recipe.optimizer_impl == "fused":
        return {"torch_adam": True, "fused": True} if recipe.deepspeed.torch_adam else {}
    return {"torch_adam": True, "foreach": recipe.optimizer_impl == "foreach"}


def _zero(recipe: RecipeSpec, nvme_path: str | None) -> dict[str, object]:
    options = {
        key: value
        for key, value in asdict(recipe.deepspeed).items()
        if key not in _OURS and value is not None and _LATE.get(key) is not value
    }
    return {key: value for key, value in options.items() if not key.startswith(_OFFLOADED)} | _offloaded(options, nvme_path)


def _offloaded(options: dict[str, object], nvme_path: str | None) -> dict[str, object]:
    """Return the sections ``offload_optimizer`` and ``offload_param``, from the options with these prefixes."""
    sections: dict[str, object] = {}
    path = {} if nvme_path is None else {"nvme_path": nvme_path}
    for section in _OFFLOADED:
        if options[section] != "none":
            keys = {key.removeprefix(section + "_"): value for key, value in options.items() if key.startswith(section + "_")}
            sections[section] = {"device": options[section], **keys, **path}
    return sections
