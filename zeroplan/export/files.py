"""Writes the files that run a layout, and the launch command. Each target has a writer, which refuses what it cannot express."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from zeroplan.errors import SpecError
from zeroplan.export import megatron, torchtitan
from zeroplan.export.accelerate import accelerate_yaml
from zeroplan.export.deepspeed import with_optimizer
from zeroplan.export.fsdp2 import FSDP2_FILE, fsdp2_script
from zeroplan.spec.hardware import node_size
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import Split
from zeroplan.spec.recipe import DdpOptions, RecipeSpec, ways_of_resharding
from zeroplan.whole import unwritten, write_all

Target = Literal["deepspeed", "accelerate", "fsdp2", "torchtitan", "megatron"]
TARGETS: tuple[Target, ...] = ("deepspeed", "accelerate", "fsdp2", "torchtitan", "megatron")
#: Degrees of parallelism that a target can express.
_DEGREES: dict[str, tuple[str, ...]] = {
    "torchtitan": ("tp", "cp", "pp", "ep"),
    "megatron": ("tp", "cp", "pp", "ep"),
    "fsdp2": ("tp", "cp"),
}
_LAUNCHED_BY_ACCELERATE = ("ddp", "fsdp1", "fsdp2", "deepspeed")

#: Unusual names, so that ``--force`` replaces no other files.
DEEPSPEED_FILE, ACCELERATE_FILE = "deepspeed-zeroplan.json", "accelerate-zeroplan.yaml"
TORCHTITAN_MODULE, TORCHTITAN_FILE, MEGATRON_FILE = "torchtitan_zeroplan", "torchtitan-zeroplan.toml", "megatron-zeroplan.txt"


class File(NamedTuple):
    """One file with its name."""

    name: str
    text: str


class Export(NamedTuple):
    """The files of a layout, the command that runs them, and notes on what the training script must do."""

    files: tuple[File, ...]
    launch: str
    notes: tuple[str, ...]


def cannot_say(recipe: RecipeSpec, target: Target) -> str:
    """Return the recipe's setting that a target cannot express, in words; empty if it can express all.

    >>> cannot_say(RecipeSpec(), "fsdp2"), cannot_say(RecipeSpec(), "deepspeed")
    ('', 'its engine is fsdp2')
    """
    if target in ("torchtitan", "megatron"):
        own = torchtitan.missing(recipe) if target == "torchtitan" else megatron.missing(recipe)
        return own or _first_of(_MISSING_FROM_EVERY, recipe)
    words = _MISSING_FROM_ACCELERATE if target == "accelerate" else _MISSING_FROM_OTHERS
    if recipe.engine not in (_LAUNCHED_BY_ACCELERATE if target == "accelerate" else (target,)):
        return f"its engine is {recipe.engine}"
    return _first_of((*_MISSING_FROM_ALL, *words, *_MISSING_FROM_EVERY), recipe)


def _first_of(words: "tuple[Missing, ...]", recipe: RecipeSpec) -> str:
    return next((said for missing, said in words if missing(recipe)), "")


def cannot_split(mesh: Split, target: Target) -> str:
    """Return the degrees of parallelism that a target cannot express, in words; empty if it can express all.

    >>> from zeroplan.spec.mesh import MeshSpec
    >>> cannot_split(MeshSpec(dp_shard=8), "accelerate"), cannot_split(MeshSpec(dp_shard=4, tp=2), "accelerate")
    ('', 'the file for accelerate has no words for tp=2')
    """
    degrees = {"tp": mesh.tp, "cp": mesh.cp, "pp": mesh.pp, "ep": mesh.ep}
    inexpressible = ", ".join(
        f"{name}={ways}" for name, ways in degrees.items() if ways != 1 and name not in _DEGREES.get(target, ())
    )
    return f"the file for {target} has no words for {inexpressible}" if inexpressible else ""


def inexpressible_in(target: Target | None) -> Callable[[RecipeSpec, Split], str] | None:
    """Return a check of layouts for a search that writes this target; None without a target."""
    if target is None:
        return None
    return lambda recipe, split: cannot_say(recipe, target) or cannot_split(split, target)


Missing = tuple[Callable[[RecipeSpec], bool], str]
_MISSING_FROM_ALL: tuple[Missing, ...] = (
    (lambda recipe: recipe.loss != "full", "its loss is not the model's own; the training script would have to bring it"),
    (lambda recipe: recipe.engine != "deepspeed" and recipe.precision not in ("bf16-mixed", "fp32"),
     "under FSDP and DDP only the precisions bf16-mixed and fp32 are written"),
    (lambda recipe: recipe.fsdp2.modules != "transformers", "its modules are torchtitan's, and the file would run transformers'"),
    (lambda recipe: not recipe.fsdp2.sequence_parallel, torchtitan.WHOLE_SEQUENCES),
)  # fmt: skip
_MISSING_FROM_EVERY: tuple[Missing, ...] = (
    (lambda recipe: recipe.fsdp2.gathers_ahead,
     "no file has the blocks that FSDP2 gathers ahead or keeps (fsdp2.forward_prefetch, backward_prefetch, keeps_last)"),
    (lambda recipe: recipe.fsdp2.step_in_backward, "no file has an optimizer for each parameter (fsdp2.step_in_backward)"),
    (lambda recipe: recipe.float8_recipe is not None, "float8 is not written"),
)  # fmt: skip
_MISSING_FROM_ACCELERATE: tuple[Missing, ...] = (
    (lambda recipe: recipe.recompute_layers is not None and recipe.engine == "fsdp2", "accelerate recomputes all blocks or none"),
    (lambda recipe: recipe.engine == "fsdp1" and not recipe.fsdp1.limit_all_gathers, "its YAML always limits all-gathers"),
    (lambda recipe: recipe.engine == "fsdp1" and recipe.fsdp1.reduce_dtype == "fp32" and recipe.precision == "bf16-mixed",
     "accelerate's FSDP1 reduces gradients in bf16 (reduce_dtype='param')"),
    (lambda recipe: recipe.engine == "fsdp1" and recipe.fsdp1.checkpoints_units,
     "accelerate checkpoints inside a unit (checkpoints_units=false)"),
    (lambda recipe: recipe.recompute == "selective", "accelerate recomputes whole blocks or nothing"),
    (lambda recipe: recipe.engine == "ddp" and recipe.zero_stage == 1, "accelerate has no ZeroRedundancyOptimizer"),
    (lambda recipe: recipe.engine == "ddp" and recipe.recompute != "none", "accelerate does not recompute under DDP"),
    (lambda recipe: recipe.engine == "ddp" and recipe.ddp != DdpOptions(),
     "accelerate's configuration has no options of DDP, such as gradient_as_bucket_view"),
    (lambda recipe: recipe.engine == "fsdp2" and ways_of_resharding(recipe.fsdp2) is not None,
     "accelerate's reshard_after_forward is true or false"),
    (lambda recipe: recipe.engine == "fsdp2" and recipe.precision == "bf16-mixed" and recipe.fsdp2.reduce_dtype == "fp32",
     "accelerate's FSDP2 reduces gradients in bf16 (reduce_dtype='param')"),
)  # fmt: skip
_MISSING_FROM_OTHERS: tuple[Missing, ...] = (
    (lambda recipe: recipe.engine == "deepspeed" and recipe.recompute_layers is not None,
     "model.gradient_checkpointing_enable() recomputes all blocks; the training script would have to choose"),
    (lambda recipe: recipe.engine == "deepspeed" and recipe.recompute == "selective",
     "no switch of transformers recomputes selectively; the training script would have to"),
    (lambda recipe: recipe.engine == "fsdp2" and recipe.optimizer != "adamw", "the script is written for adamw"),
    (lambda recipe: recipe.engine == "fsdp2" and recipe.fsdp2.ends_apart,
     "the script makes no units of embedding and head (fsdp2.ends_apart)"),
)  # fmt: skip


def export(job: JobSpec, target: Target) -> Export:
    """Return the files that run a job; raises SpecError if the target cannot express it."""
    missing = cannot_say(job.recipe, target) or cannot_split(job.mesh, target)
    if missing:
        raise SpecError(f"--emit {target} cannot express this layout: {missing}")
    if job.model.adapter is None:
        return _WRITERS[target](job)
    if target == "fsdp2":
        raise SpecError(
            "--emit fsdp2 writes no adapters; use --emit accelerate, and put them into the model in your own script"
        )
    made = _WRITERS[target](job)
    return made._replace(
        notes=(*made.notes, "the training script puts the adapters into the model, as peft's get_peft_model does")
    )


def _deepspeed(job: JobSpec) -> Export:
    gpus, nodes = _nodes(job)
    launch = f"deepspeed --num_nodes {nodes} --num_gpus {gpus} train.py --deepspeed {DEEPSPEED_FILE}"
    return Export((File(DEEPSPEED_FILE, _json(job)),), launch, (*_script_recomputes(job), _LEARNING_RATE))


def _accelerate(job: JobSpec) -> Export:
    files = [File(ACCELERATE_FILE, accelerate_yaml(job, nodes=_nodes(job)[1], deepspeed_file=DEEPSPEED_FILE))]
    notes: tuple[str, ...] = ()
    if job.recipe.engine == "deepspeed":
        files.append(File(DEEPSPEED_FILE, _json(job)))
        notes = (*_script_recomputes(job), _LEARNING_RATE)
    else:
        notes = (_accumulates(job), f"the training script makes the optimizer: {_made(job)}")
    return Export(tuple(files), f"accelerate launch --config_file {ACCELERATE_FILE} train.py", notes)


def _accumulates(job: JobSpec) -> str:
    """Return a note on gradient accumulation: by default accelerate reduces gradients only after the last micro-batch."""
    steps, each = job.batch.grad_accum_steps, job.recipe.sync_every_micro_batch
    plugin = f"GradientAccumulationPlugin(num_steps={steps}, sync_each_batch={each})"
    said = f"says Accelerator(gradient_accumulation_plugin={plugin}) and " if steps > 1 else ""
    return f"the training script {said}takes {job.batch.micro_batch_size} sequences at a time"


def _fsdp2(job: JobSpec) -> Export:
    return Export(
        (File(FSDP2_FILE, fsdp2_script(job)),),
        f"torchrun {_ranks(job)}{FSDP2_FILE} MODEL",
        ("MODEL is a folder with a config.json, or a name on the Hub",),
    )


def _torchtitan(job: JobSpec) -> Export:
    """Return torchtitan's files in both forms; only 0.3 has a chunked loss."""
    launch = f"torchrun {_ranks(job)}-m torchtitan.train --module {TORCHTITAN_MODULE} --config planned"
    files = [File(f"{TORCHTITAN_MODULE}.py", torchtitan.torchtitan_function(job, launch))]
    notes = ["torchtitan's own modules, with FlexAttention, save a little more or less than transformers', which are counted"]
    if job.recipe.loss == "full":
        files.append(File(TORCHTITAN_FILE, torchtitan.torchtitan_toml(job)))
        notes.append(f"torchtitan up to 0.2 takes {TORCHTITAN_FILE} (--job.config_file) instead")
    return Export(
        tuple(files), launch, (*notes, "data, tokenizer, steps and checkpoints are those of the function it begins with")
    )


def _megatron(job: JobSpec) -> Export:
    text = megatron.megatron_arguments(job)
    launch = f"torchrun {_ranks(job)}pretrain_gpt.py $(cat {MEGATRON_FILE})"
    notes = (*megatron.megatron_notes(job), "data, tokenizer, learning rate and checkpoints are added to the arguments")
    return Export((File(MEGATRON_FILE, text),), launch, notes)


def _ranks(job: JobSpec) -> str:
    """Return torchrun's arguments for nodes and GPUs."""
    gpus, nodes = _nodes(job)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500 " if nodes > 1 else "--standalone "
    return f"{several}--nproc-per-node {gpus} "


_WRITERS: dict[Target, Callable[[JobSpec], Export]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "fsdp2": _fsdp2,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
}
_LEARNING_RATE = "the learning rate is DeepSpeed's default unless optimizer.params.lr sets another"


def _script_recomputes(job: JobSpec) -> tuple[str, ...]:
    if job.recipe.recompute == "none":
        return ()
    return ("recomputation is the training script's: model.gradient_checkpointing_enable()",)


def _made(job: JobSpec) -> str:
    recipe = job.recipe
    return (
        f"torch.optim.AdamW(..., {recipe.optimizer_impl or 'foreach'}=True)"
        if recipe.optimizer == "adamw"
        else recipe.optimizer
    )


def _json(job: JobSpec) -> str:
    return json.dumps(with_optimizer(job), indent=2) + "\n"


def _nodes(job: JobSpec) -> tuple[int, int]:
    """Return the GPUs per node, and the nodes."""
    cluster, world = job.cluster, job.mesh.world_size
    per_node = node_size(cluster) or 8
    if world > per_node and world % per_node:
        raise SpecError(
            f"{world:,} GPUs are no whole nodes of {per_node}, which launchers need; add --gpus-per-node, or use another --gpus"
        )
    return min(per_node, world), -(-world // per_node)


def write(made: Export, folder: Path, *, force: bool) -> tuple[Path, ...]:
    """Write the files into a folder, which is created if missing; raises SpecError if a file exists, unless ``force``."""
    paths = tuple(folder / file.name for file in made.files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_all({path: file.text for path, file in zip(paths, made.files, strict=True)}, force=force)
    except OSError as error:
        raise unwritten(error) from None
    return paths
