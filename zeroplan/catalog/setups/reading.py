"""Recognises the program of a configuration file or launcher script, and reads its job with that program's module."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from zeroplan.catalog.setups.parsing import parsed
from zeroplan.catalog.setups.script import OF_LAUNCHERS, Launched, arguments_of, is_arguments, is_script, launches
from zeroplan.catalog.setups.settings import Table
from zeroplan.catalog.setups.setup import DeepSpeedPart, Kind, Setting, Setup
from zeroplan.catalog.text import read_text, shown
from zeroplan.errors import SpecError

_NAMES: dict[Kind, str] = {
    "deepspeed": "DeepSpeed configuration",
    "accelerate": "accelerate configuration",
    "trainer": "TrainingArguments",
    "torchtitan": "torchtitan configuration",
    "llama-factory": "LLaMA-Factory configuration",
    "axolotl": "Axolotl configuration",
    "verl": "verl configuration",
    "ms-swift": "ms-swift's arguments",
    "openrlhf": "OpenRLHF's arguments",
    "torchtune": "torchtune recipe",
    "automodel": "NeMo AutoModel recipe",
    "megatron": "Megatron-LM's arguments",
    "nanotron": "nanotron configuration",
    "lightning": "Lightning configuration",
}
#: Module and function that read each kind; zeroplan imports a module only for its kind.
_READERS: dict[Kind, tuple[str, str]] = {
    "accelerate": ("accelerate", "accelerate_setup"), "trainer": ("trainer", "trainer_setup"),
    "torchtitan": ("torchtitan", "torchtitan_setup"), "llama-factory": ("llama_factory", "llama_factory_setup"),
    "axolotl": ("axolotl", "axolotl_setup"), "verl": ("verl", "verl_setup"), "ms-swift": ("ms_swift", "ms_swift_setup"),
    "openrlhf": ("openrlhf", "openrlhf_setup"), "torchtune": ("recipes", "torchtune_setup"),
    "automodel": ("automodel", "automodel_setup"), "megatron": ("megatron_arguments", "megatron_setup"),
    "nanotron": ("recipes", "nanotron_setup"), "lightning": ("recipes", "lightning_setup"),
}  # fmt: skip
#: LLaMA-Factory's values of ``stage``.
_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
#: Keys of each kind, one of which is enough; kinds are tried in this order.
_MARKS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("accelerate", ("distributed_type", "compute_environment")),
    ("trainer", ("per_device_train_batch_size", "num_train_epochs", "gradient_checkpointing", "output_dir", "optim",
                 "per_device_eval_batch_size", "lr_scheduler_type", "model_name_or_path", "fsdp_config", "fsdp", "deepspeed")),
    ("deepspeed", ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer")),
    ("torchtitan", ("parallelism", "activation_checkpoint", "model_spec", "training")),
)  # fmt: skip
_OF_A_JOB = ("params", "gpus", "gpu", "engine", "stage", "recipe")
#: Files that are no configuration of a training program: the error, and keys that identify them.
_FOREIGN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("is a record or an answer of zeroplan's, not a configuration file", ("schema_version",)),
    ("is a job file of zeroplan's; give it as the first argument", _OF_A_JOB),
    ("is a model's config.json; give it to --config", ("model_type", "architectures", "num_hidden_layers")),
    ("is an adapter's configuration; set --lora-rank and --lora-targets instead", ("peft_type",)),
)


def name_of(kind: Kind | None) -> str:
    """Return the name of such a file in messages."""
    return "" if kind is None else _NAMES[kind]


def is_setup(path: Path) -> bool:
    """Whether a file is another program's configuration, not a job file; raises SpecError if it cannot be read."""
    what = f"file {str(path)!r}"
    text = read_text(path, what="file")
    if is_script(text, path) or is_arguments(text):
        return True
    data = parsed(text, path, what)
    if _own_words(data) is not None:
        return True
    job = isinstance(data.get("model"), str) or any(key in data for key in (*_OF_A_JOB, "schema_version"))
    return not job and any(mark in data for _, marks in _MARKS for mark in marks)


def _own_words(data: Mapping[str, object]) -> Kind | None:
    """Return the kind of a file whose keys occur in one kind only; None if there are none."""

    def inner(table: str, key: str) -> bool:
        return isinstance(found := data.get(table), dict) and key in found

    def any_key(*begins: str) -> bool:
        return any(str(key).startswith(begins) for key in data)

    for kind, holds in (
        ("megatron", isinstance(data.get("MODEL_ARGS"), dict)),
        ("llama-factory", {"finetuning_type", "template"} <= data.keys()),
        ("verl", any_key("actor_rollout_ref", "model.partial_pretrain", "model.path") or inner("model", "partial_pretrain")),
        ("openrlhf", any_key("ds.", "micro_train_batch_size")),
        ("ms-swift", bool({"tuner_type", "train_type", "rlhf_type"} & data.keys()) and "model" in data),
        ("megatron", any_key("tensor_model_parallel_size", "num_attention_heads")
         and not {"model_type", "architectures"} & data.keys()),
        ("megatron", (isinstance(data.get("train"), dict) and (inner("train", "train_iters") or inner("train", "global_batch_size"))
         and not inner("train", "micro_batch_size")) or inner("train", "train_iters")),
        ("nanotron", "tokens" in data and "parallelism" in data),
        ("automodel", "step_scheduler" in data),
        ("torchtune", inner("model", "_component_") or inner("tokenizer", "_component_") or inner("checkpointer", "_component_")),
        ("lightning", inner("trainer", "devices")
         or (inner("train", "micro_batch_size") and bool({"precision", "checkpoint_dir", "model_name"} & data.keys()))
         or inner("trainer", "accelerator")),
        ("llama-factory", {"model_class", "dist_config"} & data.keys() or "finetuning_type" in data or data.get("stage") in _STAGES
         or ("template" in data and "model_name_or_path" in data)),
        ("axolotl", isinstance(data.get("base_model"), str)),
    ):  # fmt: skip
        if holds:
            return kind  # type: ignore[return-value]
    return None


def read_setup(path: Path, *, gpus: int | None) -> Setup:
    """Return the job in a configuration; raises SpecError with one line for other files and unmodelled settings.

    ``gpus`` is the number of GPUs in the user's flags, as some files leave it out.
    """
    what = f"configuration file {str(path)!r}"
    text = read_text(path, what="configuration file")
    if is_script(text, path):
        return _launched_setup(text, path, gpus)
    if is_arguments(text):
        return _setup(arguments_of(text, what), path, gpus)
    return _setup(parsed(text, path, what), path, gpus)


def _setup(data: Mapping[str, object], path: Path, gpus: int | None, kind: Kind | None = None) -> Setup:
    kind = kind or _kind(data, f"configuration file {str(path)!r}")
    where = f"{_NAMES[kind]} {str(path)!r}"
    if kind == "deepspeed":
        return Setup(kind, deepspeed=DeepSpeedPart(data, where))
    module, function = _READERS[kind]
    reader = getattr(import_module(f"zeroplan.catalog.setups.{module}"), function)
    return cast("Setup", reader(Table(data, where), path.parent, gpus))


#: Words that identify a program in a command, and the kind of its arguments.
_PROGRAMS: tuple[tuple[str, Kind], ...] = (
    ("openrlhf.cli.train", "openrlhf"), ("verl", "verl"), ("main_ppo", "verl"), ("main_dapo", "verl"), ("swift", "ms-swift"),
    ("megatron sft", "ms-swift"), ("megatron pt", "ms-swift"), ("megatron rlhf", "ms-swift"),
)  # fmt: skip
_FILES = (".yaml", ".yml", ".json", ".toml")


def _launched_setup(text: str, path: Path, gpus: int | None) -> Setup:
    """Return the job of a script's training command, from its arguments, or from its file with ``key=value`` overrides."""
    commands = launches(text, f"script {str(path)!r}")
    reasons: list[str] = []
    for one in commands:
        try:
            return _of_command(one, path, gpus)
        except _NoTrainingError as error:
            reasons.append(str(error))
    raise SpecError(
        f"script {str(path)!r} launches no training that zeroplan knows{f': {reasons[0]}' if reasons else ''}; "
        "give the job as flags"
    )


class _NoTrainingError(SpecError):
    """A command that runs no known training program."""


def _of_command(one: Launched, path: Path, gpus: int | None) -> Setup:
    words = " ".join(one.words[-2:])
    kind = next((kind for name, kind in _PROGRAMS if name in words), None)
    data = {key: value for key, value in one.arguments.items() if key and value != "" and key not in OF_LAUNCHERS}
    named = _named_config(one, path)
    if named is not None:
        beside = parsed(read_text(named, what="configuration file"), named, f"configuration file {str(named)!r}")
        data = overridden(
            beside, {key: value for key, value in data.items() if key not in ("config", "c", "config_name", "config_path")}
        )
        kind = None
    elif kind is None:
        kind = "megatron" if {"num_layers", "tensor_model_parallel_size"} & data.keys() else None
    kind = kind or _own_words(data) or next((kind for kind, marks in _MARKS[1:2] if len(set(marks) & data.keys()) > 1), None)
    if kind is None:
        raise _NoTrainingError(words)
    setting = one.gpus
    if setting is not None and kind in ("openrlhf", "ms-swift", "megatron", "torchtune", "automodel"):
        data["launched_gpus"] = setting
    if kind == "ms-swift":
        data |= {name: one.variables[name] for name in (*_SAMPLES, *_PIXELS, _SPEECH) if name in one.variables}
    if kind == "trainer" and _runs(one.words, "dpo"):
        data.setdefault("beta", _DPO_BETA)
    if kind == "trainer" and _runs(one.words, "sft"):
        data.setdefault("loss_type", "nll")
    setup = _setup(data, path, gpus or setting, kind)
    accelerate = one.launcher.get("config_file")
    if kind in ("trainer", "axolotl", "llama-factory") and isinstance(accelerate, str):
        setup = _beside_accelerate(setup, named_file(accelerate, path.parent, f"script {str(path)!r}"), gpus)
    if setting is not None and "gpus" not in setup.flags:
        setup = setup._replace(flags={**setup.flags, "gpus": Setting("the launcher", setting)})
    return setup


#: Variables of a script that say how many answers of an example ms-swift's rerankers take (template/base.py).
_SAMPLES = ("MAX_POSITIVE_SAMPLES", "MAX_NEGATIVE_SAMPLES")
#: Variables that limit the size of an image in ms-swift (model/models/qwen.py, patch_qwen_vl_utils).
_PIXELS = ("MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM")
#: The variable that leaves out the parts of Qwen's Omni models that make speech (ms-swift, Qwen2_5OmniLoader.get_config).
_SPEECH = "ENABLE_AUDIO_OUTPUT"
#: TRL's default (1.16, DPOConfig.beta).
_DPO_BETA = 0.1


def _runs(words: Sequence[str], name: str) -> bool:
    """Whether a command runs TRL's trainer of this name: ``trl dpo``, TRL's module, or a script of that name."""
    last = words[-1]
    return (
        tuple(words[-2:]) == ("trl", name)
        or last in (f"trl.scripts.{name}", f"trl.scripts.{name}_vlm")
        or Path(last).name in (f"{name}.py", f"run_{name}.py", f"{name}_vlm.py")
    )


def _named_config(one: Launched, path: Path) -> Path | None:
    """Return the configuration file named by a command: in the current folder, beside the script or above it; None if none is."""
    rest = one.arguments.get("")
    loose = [str(word) for word in rest] if isinstance(rest, list) else []
    named = [str(one.arguments[key]) for key in ("config", "c") if isinstance(one.arguments.get(key), str)]
    for word in (*named, *loose):
        if word.endswith(_FILES):
            for folder in (Path(), path.parent, *list(path.resolve().parents)[:6]):
                if (found := folder / word).is_file():
                    return found
            raise SpecError(f"script {str(path)!r} trains with {shown(word)}, which is not here; give that file")
    return None


def overridden(data: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Return nested tables with overrides ``a.b=value`` applied, as Hydra, OmegaConf and jsonargparse do.

    >>> overridden({"a": {"b": 1}}, {"a.b": "2", "c": True})
    {'a': {'b': '2'}, 'c': True}
    """
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    for key, value in over.items():
        first, _, rest = key.partition(".")
        inner = made.get(first)
        made[first] = overridden(inner if isinstance(inner, dict) else {}, {rest: value}) if rest else value
    return made


def _beside_accelerate(setup: Setup, file: Path, gpus: int | None) -> Setup:
    """Return a script's job, with engine, stage and GPUs from the file that it gives to ``accelerate launch``."""
    other = read_setup(file, gpus=gpus)
    engine = {
        key: setting
        for key, setting in other.flags.items()
        if key in setup.flags and (setup.flags[key].filled or not setting.filled)
    }
    if "log_probs" in setup.flags:  # no logits that its loop could keep
        engine.pop("keep_logits", None)
    more = {key: setting for key, setting in other.flags.items() if key not in setup.flags}
    return setup._replace(
        flags={**setup.flags, **engine, **more}, options={**other.options, **setup.options}, asks={**other.asks, **setup.asks},
        notes=(*setup.notes, *other.notes), deepspeed=setup.deepspeed or other.deepspeed, own_units=setup.own_units,
    )  # fmt: skip


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
        f"{what} is not a configuration that zeroplan knows: "
        f"{', '.join(list(_NAMES.values())[:-1])} or {_NAMES['lightning']}; "
        "give the job as flags"
    )


def named_file(named: str, folder: Path, where: str) -> Path:
    """Return the path of a file named in a configuration: in the current folder, beside the configuration, or above it."""
    path = Path(named)
    try:
        above = [*([folder] if path.is_absolute() else []), folder, *list(folder.resolve().parents)[:6]]
        return (
            path
            if path.is_absolute() or path.exists()
            else next((f / path for f in above if (f / path).exists()), folder / path)
        )
    except (OSError, ValueError):
        raise SpecError(f"{where} names a file that cannot be read: {shown(named)}") from None


def deepspeed_beside(named: str, folder: Path, where: str) -> DeepSpeedPart:
    """Return the DeepSpeed configuration named in another configuration."""
    from zeroplan.catalog.deepspeed_config import parsed_config  # noqa: PLC0415  only a configuration that names one pays for it

    return DeepSpeedPart(*parsed_config(named_file(named, folder, where)))
