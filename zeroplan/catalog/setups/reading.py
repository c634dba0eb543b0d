"""Which kind of set-up is a file, and what does it say of a job?"""

from collections.abc import Mapping
from pathlib import Path

from zeroplan.catalog.setups.parsing import parsed
from zeroplan.catalog.setups.told import DeepSpeedPart, Kind, Setup, Table
from zeroplan.catalog.text import read_text, shown
from zeroplan.errors import SpecError

_NAMES: dict[Kind, str] = {
    "deepspeed": "DeepSpeed configuration",
    "accelerate": "accelerate configuration",
    "trainer": "TrainingArguments",
    "torchtitan": "torchtitan configuration",
    "llama-factory": "LLaMA-Factory configuration",
    "axolotl": "Axolotl configuration",
}
#: Words of a file that no other kind has; they go before keys that several kinds share.
_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
#: One of these keys is enough, in this order.
_MARKS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("accelerate", ("distributed_type", "compute_environment")),
    ("trainer", ("per_device_train_batch_size", "num_train_epochs", "gradient_checkpointing", "output_dir", "optim",
                 "per_device_eval_batch_size", "lr_scheduler_type", "model_name_or_path", "fsdp_config", "fsdp", "deepspeed")),
    ("deepspeed", ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer")),
    ("torchtitan", ("parallelism", "activation_checkpoint", "model_spec", "training")),
)  # fmt: skip
_OF_A_JOB = ("params", "gpus", "gpu", "engine", "stage", "recipe")
#: Files that are something else, by a key of theirs, and where they belong.
_FOREIGN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("is a record or an answer of zeroplan's, not a set-up", ("schema_version",)),
    ("is a job file of zeroplan's; give it as the first argument", _OF_A_JOB),
    ("is a model's config.json; give it to --config", ("model_type", "architectures", "num_hidden_layers")),
    ("is an adapter's configuration; say --lora-rank and --lora-targets", ("peft_type",)),
    ("holds arguments of LLaMA-Factory's v1, which are not read; say them as flags", ("model_class", "dist_config")),
    ("holds Megatron-LM's arguments, which are not read; say them as flags", ("tensor_model_parallel_size",)),
)


def name_of(kind: Kind) -> str:
    """What such a file is called."""
    return _NAMES[kind]


def is_setup(path: Path) -> bool:
    """Whether a file is a set-up of another program's rather than a job file; one that cannot be read is refused."""
    what = f"file {str(path)!r}"
    data = parsed(read_text(path, what="file"), path, what)
    if _own_words(data) is not None:
        return True
    job = isinstance(data.get("model"), str) or any(key in data for key in (*_OF_A_JOB, "schema_version"))
    return not job and any(mark in data for _, marks in _MARKS for mark in marks)


def _own_words(data: Mapping[str, object]) -> Kind | None:
    if "finetuning_type" in data or data.get("stage") in _STAGES or ("template" in data and "model_name_or_path" in data):
        return "llama-factory"
    return "axolotl" if isinstance(data.get("base_model"), str) else None


def read_setup(path: Path, *, gpus: int | None) -> Setup:
    """Read a set-up; raises SpecError in one line for what is none, or is not modelled.

    ``gpus`` is how many GPUs are asked for beside it: some files do not say.
    """
    what = f"set-up {str(path)!r}"
    data = parsed(read_text(path, what="set-up"), path, what)
    kind = _kind(data, what)
    where = f"{_NAMES[kind]} {str(path)!r}"
    if kind == "deepspeed":
        return Setup(kind, deepspeed=DeepSpeedPart(data, where))
    table = Table(data, where)
    if kind == "accelerate":
        from zeroplan.catalog.setups.accelerate import accelerate_setup  # noqa: PLC0415  only the kind at hand is loaded

        return accelerate_setup(table, path.parent)
    if kind == "trainer":
        from zeroplan.catalog.setups.trainer import trainer_setup  # noqa: PLC0415

        return trainer_setup(table, path.parent)
    if kind == "llama-factory":
        from zeroplan.catalog.setups.llama_factory import llama_factory_setup  # noqa: PLC0415

        return llama_factory_setup(table, path.parent)
    if kind == "axolotl":
        from zeroplan.catalog.setups.axolotl import axolotl_setup  # noqa: PLC0415

        return axolotl_setup(table, path.parent)
    from zeroplan.catalog.setups.torchtitan import torchtitan_setup  # noqa: PLC0415

    return torchtitan_setup(table, gpus)


def _kind(data: Mapping[str, object], what: str) -> Kind:
    if (own := _own_words(data)) is not None:
        return own
    for belongs, theirs in _FOREIGN:
        if any(mark in data for mark in theirs):
            raise SpecError(f"{what} {belongs}")
    for kind, marks in _MARKS:
        if any(mark in data for mark in marks):
            return kind
    raise SpecError(
        f"{what} is no set-up that is known: a DeepSpeed configuration, an accelerate one, TrainingArguments, or "
        "torchtitan's, LLaMA-Factory's or Axolotl's; say the job as flags"
    )


def named_file(named: str, folder: Path, where: str) -> Path:
    """A file that a set-up names: from where one stands, as its program looks, or beside the set-up."""
    path = Path(named)
    try:
        return path if path.is_absolute() or path.exists() else folder / path
    except (OSError, ValueError):
        raise SpecError(f"{where} names a file that cannot be read: {shown(named)}") from None


def deepspeed_beside(named: str, folder: Path, where: str) -> DeepSpeedPart:
    """The DeepSpeed configuration that a set-up names."""
    from zeroplan.catalog.deepspeed_config import parsed_config  # noqa: PLC0415  only a set-up that names one pays for it

    return DeepSpeedPart(*parsed_config(named_file(named, folder, where)))
