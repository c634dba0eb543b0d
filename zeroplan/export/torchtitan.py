"""Writes a job for torchtitan: as a Python function that returns its configuration (since 0.3), and as TOML (up to 0.2).

Source: torchtitan, config/README.md and config/manager.py of both versions.
"""

import json
import re
from collections.abc import Iterator

from zeroplan.catalog.setups.torchtitan import MODELS
from zeroplan.errors import SpecError
from zeroplan.export.fsdp2 import reshards
from zeroplan.spec.job import JobSpec
from zeroplan.spec.pipeline import TORCHS_NAMES
from zeroplan.spec.recipe import DdpOptions, RecipeSpec, ways_of_resharding

#: The models of which torchtitan 0.3 has a function that returns their configuration.
_CONFIGURED = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b",
)  # fmt: skip
_IMPLEMENTATIONS = {None: "foreach", "foreach": "foreach", "fused": "fused", "forloop": "for-loop"}

#: Classes of 0.3 (distributed/activation_checkpoint.py).
_POLICIES: dict[str, str] = {"full": "FullAC", "selective": "SelectiveAC"}
_Value = str | int | bool
WHOLE_SEQUENCES = "tensor-parallel ranks are written to split the sequence (fsdp2.sequence_parallel)"


def missing(recipe: RecipeSpec) -> str:
    """Return the recipe's setting that torchtitan cannot express, in words; empty if it can express all."""
    sharded = recipe.engine == "fsdp2"
    for inexpressible, said in (
        (not sharded and not (recipe.engine == "ddp" and recipe.zero_stage == 0), "torchtitan runs FSDP2, or DDP without ZeRO"),
        (
            recipe.recompute_layers is not None,
            "torchtitan recomputes all blocks, or every second or third one, not the first ones",
        ),
        (recipe.loss == "fused", "torchtitan has no fused head and loss"),
        (recipe.precision == "fp16-mixed", "torchtitan has no fp16"),
        (recipe.optimizer != "adamw", "only the optimizer adamw is written"),
        (not recipe.fsdp2.sequence_parallel, WHOLE_SEQUENCES),
        (sharded and ways_of_resharding(recipe.fsdp2) is not None, "torchtitan reshards over all ranks or none"),
        (sharded and recipe.precision == "bf16-mixed" and recipe.fsdp2.reduce_dtype == "param", "torchtitan reduces in fp32"),
        (
            recipe.ddp != DdpOptions() and not sharded,
            "torchtitan's DDP has no options, such as gradient_as_bucket_view",
        ),
        (recipe.attention != "sdpa", "only the attention sdpa is written"),
        (bool(recipe.keep_logits), "torchtitan lets go of its logits"),
        (recipe.offload_activations, "torchtitan keeps activations on the GPU"),
        (recipe.pipeline_stages_per_rank is not None, "how many stages a rank has is left to torchtitan"),
        (recipe.pipeline_layers is not None, "which layers a stage has is left to torchtitan"),
    ):
        if inexpressible:
            return said
    return ""


def _flavor(job: JobSpec) -> tuple[str, str]:
    """Return torchtitan's module and flavour of the model; raises SpecError if it has none, or cannot run the job."""
    if job.model.name not in _CONFIGURED or job.model.adapter is not None or job.model.frozen is not None:
        raise SpecError(
            f"--emit torchtitan: torchtitan configures no {job.model.name or 'such model'} trained as a whole; it has "
            f"{', '.join(_CONFIGURED)}"
        )
    if job.batch.grad_accum_steps > 1 and not job.recipe.sync_every_micro_batch:
        raise SpecError("--emit torchtitan: torchtitan reduces gradients after every micro-batch; leave --no-sync out")
    if job.recipe.engine == "fsdp2" and job.mesh.dp_shard * job.mesh.cp == 1:
        raise SpecError(
            "--emit torchtitan: torchtitan uses FSDP2 only where several ranks shard; use more GPUs, or engine 'ddp'"
        )
    return next(names for names, model in MODELS.items() if model == job.model.name)


def _tables(job: JobSpec) -> dict[str, dict[str, _Value]]:
    """Return the tables and keys that both formats have."""
    return {
        "training": _training(job),
        "parallelism": _parallelism(job),
        "optimizer": {"implementation": _IMPLEMENTATIONS[job.recipe.optimizer_impl]},
        "compile": {"enable": False},
    }


def _training(job: JobSpec) -> dict[str, _Value]:
    recipe, mesh, batch = job.recipe, job.mesh, job.batch
    of_a_rank = batch.micro_batch_size * batch.grad_accum_steps
    return {
        "local_batch_size": of_a_rank if mesh.pp > 1 else batch.micro_batch_size,
        "global_batch_size": of_a_rank * mesh.dp_replicate * mesh.dp_shard,
        "seq_len": batch.seq_len,
        "enable_cpu_offload": recipe.engine == "fsdp2" and recipe.fsdp2.cpu_offload,
        "dtype": "float32" if recipe.precision in ("fp32", "bf16-mixed") else "bfloat16",
        "mixed_precision_param": "float32" if recipe.precision == "fp32" else "bfloat16",
    }


def _parallelism(job: JobSpec) -> dict[str, _Value]:
    recipe, mesh = job.recipe, job.mesh
    sharded = recipe.engine == "fsdp2"
    schedule: dict[str, _Value] = {
        "pipeline_parallel_schedule": TORCHS_NAMES[recipe.pipeline_schedule or "1f1b"],
        "pipeline_parallel_microbatch_size": job.batch.micro_batch_size,
    }
    return {
        "data_parallel_replicate_degree": mesh.dp_replicate if sharded else mesh.dp_replicate * mesh.dp_shard,
        "data_parallel_shard_degree": mesh.dp_shard if sharded else 1,
        "tensor_parallel_degree": mesh.tp,
        "context_parallel_degree": mesh.cp,
        "pipeline_parallel_degree": mesh.pp,
        "expert_parallel_degree": mesh.ep,
        **(schedule if mesh.pp > 1 else {}),
        "fsdp_reshard_after_forward": "always" if reshards(recipe) else "never",
    }


def torchtitan_toml(job: JobSpec) -> str:
    """Return the TOML that torchtitan up to 0.2 reads."""
    (module, flavor), tables = _flavor(job), _tables(job)
    tables["optimizer"] = {"name": "AdamW", **tables["optimizer"]}
    model: dict[str, _Value] = {"name": module, "flavor": flavor}
    again: dict[str, _Value] = {"mode": job.recipe.recompute}
    if job.recipe.recompute == "selective":
        again["selective_ac_option"] = "op"
    whole: dict[str, dict[str, _Value]] = {"model": model, **tables, "activation_checkpoint": again}
    return "\n".join(_toml(whole)) + "\n"


def _toml(tables: dict[str, dict[str, _Value]]) -> Iterator[str]:
    for at, (name, table) in enumerate(tables.items()):
        yield f"{chr(10) if at else ''}[{name}]"
        yield from (f"{key} = {json.dumps(value)}" for key, value in table.items())


def _python(value: _Value) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


_SCRIPT = '''"""As planned by zeroplan, for torchtitan 0.3: start it with

    {launch}
"""

{imports}

def planned():
    config = {function}()
{assigned}
    return config
'''


def torchtitan_function(job: JobSpec, launch: str) -> str:
    """Return the Python file with the function ``planned`` for torchtitan 0.3's ``--module`` and ``--config``."""
    (module, flavor), tables = _flavor(job), _tables(job)
    function = re.sub(r"\W", "_", f"{module}_{flavor.lower()}")
    tables["training"]["disable_cuda_graphs"] = True
    lines = [f"config.{name}.{key} = {_python(value)}" for name, table in tables.items() for key, value in table.items()]
    policy = _POLICIES.get(job.recipe.recompute)
    lines.append(f"config.activation_checkpoint = {policy + '.Config()' if policy else None}")
    if job.recipe.loss == "full":
        lines.append("config.loss = config.loss.loss_fn")
    imports = [
        *([f"from torchtitan.distributed.activation_checkpoint import {policy}"] if policy else []),
        f"from torchtitan.models.{module}.config_registry import {function}",
    ]
    return _SCRIPT.format(
        launch=launch,
        imports="\n".join(imports) + "\n",
        function=function,
        assigned="\n".join(f"    {line}" for line in lines),
    )
