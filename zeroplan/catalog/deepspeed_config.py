"""Reads a job from a DeepSpeed configuration (``ds_config.json``).

Keys are DeepSpeed 0.19's. Keys that change memory go into the job's fields, or are refused if there is no field. The reader
ignores keys that change no memory, and names unknown keys in a note. It fills in ``"auto"`` as transformers' Trainer does
(transformers 5.23, integrations/deepspeed.py), from the flags beside the file, or with DeepSpeed's default.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple, get_args

from zeroplan.catalog.setups.keys import Keys, keys_of
from zeroplan.catalog.text import read_text, shown, strict_json
from zeroplan.errors import SpecError
from zeroplan.spec.recipe import DeepSpeedOptions, OffloadDevice, Stage

_AUTO = "auto"


#: The section in which a file of zeroplan's says what DeepSpeed has no keys for, and its keys.
OWN_SECTION = "zeroplan"
OF_THE_SCRIPT = ("seq_len", "recompute", "attention", "keep_logits", "optimizer", "optimizer_impl")


class Beside(NamedTuple):
    """The values that replace ``"auto"`` in the file: the model's width, the ranks, and the user's flags."""

    hidden_size: int
    ranks: int
    precision: str | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None


class Stated(NamedTuple):
    """A value of the file and its key; ``auto``: the value was filled in."""

    key: str
    value: object
    auto: bool = False

    def __str__(self) -> str:
        """Return key and value as a clause, for messages."""
        if isinstance(self.value, bool):
            return f"{self.key} is {str(self.value).lower()}"
        if isinstance(self.value, int):
            return f"{self.key} is {self.value:,}"
        return f"{self.key} is {'left to DeepSpeed' if self.value is None else self.value}"


class DeepSpeedConfig(NamedTuple):
    """The file's values for a job, by flag and by option of DeepSpeed."""

    flags: Mapping[str, Stated]
    options: Mapping[str, Stated]
    notes: tuple[str, ...]
    of_the_script: Mapping[str, object] = {}
    """What the training script sets, by flag: zeroplan's own section, which it writes."""


def parsed_config(path: Path) -> tuple[dict[str, object], str]:
    """Return the keys and values of a file, and its name for errors; raises SpecError in one line for an invalid file."""
    where = f"DeepSpeed configuration {str(path)!r}"
    data = strict_json(read_text(path, what="DeepSpeed configuration"), where)
    if not isinstance(data, dict):
        raise SpecError(f"{where} holds {shown(data)}, not a JSON object")
    return data, where


def config_of(data: Mapping[str, object], where: str, beside: Beside) -> DeepSpeedConfig:
    """Return the values of a parsed configuration, from DeepSpeed's own file or a section of another program's file.

    Raises SpecError in one line for settings that are not modelled. It does not check everything that DeepSpeed refuses.
    """
    return _Reader(data, where, beside).read()


class _Reader:
    def __init__(self, data: Mapping[str, object], where: str, beside: Beside) -> None:
        self._where, self._beside, self._data = where, beside, data
        self._zero = self._section("zero_optimization")
        self._flags: dict[str, Stated] = {"engine": Stated("its engine", "deepspeed")}
        self._options: dict[str, Stated] = {}
        self._notes: list[str] = []

    def read(self) -> DeepSpeedConfig:
        self._refuse_what_is_not_modelled()
        self._read_stage()
        self._read_precision()
        self._read_offload()
        self._read_optimizer()
        self._read_batch()
        self._read_options()
        self._read_data_types()
        self._read_clipping()
        self._note_unknown_keys()
        return DeepSpeedConfig(self._flags, self._options, tuple(self._notes), self._of_the_script())

    # Refused and unknown keys

    def _refuse_what_is_not_modelled(self) -> None:
        for prefix, section, keys in self._sections_with_keys():
            for key in keys.refused.split():
                harmless = keys.harmless.get(key, [None])[0]
                if key in section and not _is_off(section[key], harmless) and not self._unread(key):
                    raise SpecError(
                        f"{self._where}: {prefix}{key}={shown(section[key])} changes memory in a way that is not modelled; "
                        "leave it out"
                    )
        for section_name, inner in _INNER_REFUSED:
            if not _is_off(value := self._section(section_name).get(inner), None):
                raise SpecError(
                    f"{self._where}: {section_name}.{inner}={shown(value)} changes memory in a way that is not modelled; "
                    "leave it out"
                )

    def _sections_with_keys(self) -> Iterator[tuple[str, Mapping[str, object], Keys]]:
        yield "", self._data, keys_of("deepspeed")
        yield "zero_optimization.", self._zero, keys_of("deepspeed-zero_optimization")

    def _unread(self, key: str) -> bool:
        """Whether only ZeRO's stages 1 and 2 read a key, and the stage is another (engine.py, _configure_zero_optimizer)."""
        return key == "round_robin_gradients" and str(self._zero.get("stage", 0)) not in ("1", "2")

    def _note_unknown_keys(self) -> None:
        for prefix, section, keys in self._sections_with_keys():
            for key in sorted(section.keys() - {*keys.known.split(), *keys.refused.split(), *(_OPTION_OF if prefix else ())}):
                self._notes.append(f"{shown(prefix + key)} is not known here and left out")

    def _of_the_script(self) -> dict[str, object]:
        """Return what a file of zeroplan's says of the training script, in a section that DeepSpeed passes over."""
        section = self._section(OWN_SECTION)
        unknown = sorted(section.keys() - set(OF_THE_SCRIPT))
        self._notes += [f"{shown(f'{OWN_SECTION}.{key}')} is not known here and left out" for key in unknown]
        return {key: value for key, value in section.items() if key in OF_THE_SCRIPT and value is not None}

    # Keys that set fields of the job

    def _read_stage(self) -> None:
        key = "zero_optimization.stage"
        stage = self._whole(self._zero.get("stage", 0), key)
        if stage not in get_args(Stage):
            raise SpecError(f"{self._where}: {key}={stage} is none of {', '.join(map(str, get_args(Stage)))}")
        self._flags["stage"] = Stated(key, stage)

    def _read_precision(self) -> None:
        low = {name: self._section(key) for name, key in (("bf16-mixed", "bf16"), ("fp16-mixed", "fp16"))}
        if "bfloat16" in self._data:
            low["bf16-mixed"] = {**self._section("bfloat16"), **low["bf16-mixed"]}
        enabled = {name: self._switch(section.get("enabled", False), name) for name, section in low.items()}
        on = [name for name, value in enabled.items() if value is True]
        auto = [name for name, value in enabled.items() if value is None]
        if len(on) > 1:
            raise SpecError(f"{self._where} enables bf16 and fp16; DeepSpeed runs one of them")
        if on or not auto:
            precision = on[0] if on else "fp32"
            self._flags["precision"] = Stated(f"{precision[:4]}.enabled" if on else "neither bf16 nor fp16", precision)
        else:
            self._resolve_auto_precision(auto)
        self._read_low_precision_states(low["bf16-mixed"])

    def _resolve_auto_precision(self, auto: list[str]) -> None:
        """Resolve ``auto``: it follows the Trainer's ``bf16`` and ``fp16``, here ``--precision``, or else the file's section."""
        key, precision = f"{auto[0][:4]}.enabled", self._beside.precision
        if precision is None:
            self._notes.append(f"{key} is auto and --precision not given: zeroplan assumes {auto[0]}")
        fits = precision is None or precision in (*auto, "fp32")
        self._flags["precision"] = Stated(key, (precision or auto[0]) if fits else auto[0])

    def _read_low_precision_states(self, bf16: Mapping[str, object]) -> None:
        """Read the states' dtypes: precision ``bf16`` has weights and states in bf16; only one of them in bf16 is not modelled."""
        keys = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
        low = [self._switch(bf16.get(key, False), f"bf16.{key}") is True for key in keys]
        if not any(low) or self._flags["precision"].value != "bf16-mixed":
            return
        if not all(low):
            raise SpecError(f"{self._where}: bf16.{keys[0]} without bf16.{keys[1]} is not modelled; set both or neither")
        self._flags["precision"] = Stated(f"bf16.{keys[0]}", "bf16")

    def _read_offload(self) -> None:
        """Read the devices for optimizer and parameters. NVMe's own keys are ignored with ``cpu``, and paths always."""
        for name in ("offload_optimizer", "offload_param"):
            section, key = self._object(self._zero.get(name) or {}, f"zero_optimization.{name}"), f"zero_optimization.{name}"
            device = section.get("device", "none")
            if device not in get_args(OffloadDevice):
                raise SpecError(f"{self._where}: {key}.device={shown(device)} is none of {', '.join(get_args(OffloadDevice))}")
            if device == "none":
                continue
            self._read_nvme(name, section)
            for inner, harmless in (("ratio", 1.0), ("super_offload", False)):
                if section.get(inner, harmless) != harmless:
                    raise SpecError(f"{self._where}: {key}.{inner}={shown(section[inner])} is not modelled; leave it out")
            self._flags[name] = Stated(f"{key}.device", device)
            self._set_option(f"{name}_pin_memory", f"{key}.pin_memory", section.get("pin_memory", True))

    def _read_nvme(self, name: str, section: Mapping[str, object]) -> None:
        """Read NVMe's buffers and pipelines. The size of reads and writes is always DeepSpeed's default."""
        if section.get("device") != "nvme":
            return
        for inner in _NVME_KEYS[name]:
            if inner in section:
                value = section[inner]
                whole = int(value) if isinstance(value, float) and value.is_integer() else value  # 1e9
                self._set_option(f"{name}_{inner}", f"zero_optimization.{name}.{inner}", whole)
        aio = self._section("aio")
        if aio.get("use_gds"):
            raise SpecError(f"{self._where}: aio.use_gds changes memory in a way that is not modelled; leave it out")
        for inner, default in (("block_size", 1 << 20), ("intra_op_parallelism", 1)):
            if aio.get(inner, default) != default:
                note = f"aio.{inner}={shown(aio[inner])} is left out: {default} is DeepSpeed's default"
                self._notes += [] if note in self._notes else [note]

    def _read_optimizer(self) -> None:
        """Read the optimizer. DeepSpeed's Adam and AdamW are its FusedAdam, or torch's with ``torch_adam`` (runtime/engine.py)."""
        section = self._section("optimizer")
        kind = section.get("type")
        if kind is None:
            return
        name = kind.lower() if isinstance(kind, str) else ""
        if name not in ("adam", "adamw", "muon"):
            raise SpecError(f"{self._where}: optimizer.type={shown(kind)} is not modelled; Adam, AdamW and Muon are")
        params = self._object(section.get("params", {}), "optimizer.params")
        if name == "muon":
            self._read_muon(params)
            return
        torchs = self._switch(params.get("torch_adam", False), "optimizer.params.torch_adam") is True
        default = "offload_optimizer" not in self._flags  # torch's Adam loops over tensors on the host
        listed = params.get("foreach") is True or (params.get("foreach") is None and default)
        fused = not torchs or self._switch(params.get("fused", False), "optimizer.params.fused") is True
        self._flags["optimizer"] = Stated("optimizer.type", name)
        self._flags["optimizer_impl"] = Stated("optimizer.type", "fused" if fused else "foreach" if listed else "forloop")
        if torchs and fused:
            self._options["torch_adam"] = Stated("optimizer.params.torch_adam", value=True)

    def _read_muon(self, params: Mapping[str, object]) -> None:
        """Read Muon's parameters that change memory; only DeepSpeed's defaults of them are modelled."""
        for key, default in (("ns_method", "gram"), ("per_head_muon", False), ("torch_adam", False)):
            if params.get(key, default) != default:
                raise SpecError(
                    f"{self._where}: optimizer.params.{key}={shown(params[key])} with Muon is not modelled; leave it out"
                )
        self._flags["optimizer"] = Stated("optimizer.type", "muon")

    def _read_batch(self) -> None:
        """Read the batch: two of three numbers give the third, as in DeepSpeed (``_set_batch_related_parameters``)."""
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        total, micro, steps = (self._count(key) for key in keys)
        for flag, key, value in (("micro_batch", keys[1], micro), ("grad_accum", keys[2], steps)):
            if value is not None:
                self._flags[flag] = Stated(key, value)
            elif self._data.get(key) == _AUTO and getattr(self._beside, flag) is None and total is None:
                self._notes.append(f"{key} is auto and --{flag.replace('_', '-')} not given: zeroplan assumes 1")
        if total is not None:
            self._divide(total, micro or self._beside.micro_batch, steps or self._beside.grad_accum)

    def _divide(self, total: int, micro: int | None, steps: int | None) -> None:
        ranks = self._beside.ranks
        if micro is None:
            steps = steps or 1
            micro = total // (ranks * steps)
        elif steps is None:
            steps = total // (ranks * micro)
        if total != ranks * micro * steps or not micro or not steps:
            raise SpecError(
                f"{self._where}: train_batch_size={total:,} is not {micro:,} sequences per GPU x {steps:,} micro-batches x "
                f"{ranks:,} GPUs (--gpus)"
            )
        self._flags.setdefault("micro_batch", Stated("train_batch_size", micro))
        self._flags.setdefault("grad_accum", Stated("train_batch_size", steps))

    def _read_options(self) -> None:
        for key, name in _OPTION_OF.items():
            if key not in self._zero:
                continue
            value, key_shown = self._zero[key], f"zero_optimization.{key}"
            if value == _AUTO:
                self._options[name] = Stated(key_shown, self._auto(name), auto=True)
                continue
            whole = int(value) if isinstance(value, float) and value.is_integer() else value  # 5e8
            if name == "sub_group_size" and whole == 0 and not isinstance(whole, bool):
                whole = 1  # a parameter fills a group either way (runtime/zero/stage3.py, _create_fp16_sub_groups)
            self._set_option(name, key_shown, whole)

    def _auto(self, name: str) -> object:
        """Return the Trainer's value for ``"auto"`` (``trainer_config_finalize``), or DeepSpeed's default."""
        width, third = self._beside.hidden_size, self._flags["stage"].value == 3
        if name == "reduce_bucket_size":
            return width * width
        if third and name == "stage3_prefetch_bucket_size":
            return int(0.9 * width * width)
        if third and name == "stage3_param_persistence_threshold":
            return 10 * width
        return getattr(DeepSpeedOptions(), name)

    def _set_option(self, name: str, key: str, value: object) -> None:
        try:
            DeepSpeedOptions(**{name: value})  # type: ignore[arg-type]  # checked there
        except SpecError as error:
            raise SpecError(f"{self._where}: {key}: {error}") from None
        self._options[name] = Stated(key, value)

    def _read_data_types(self) -> None:
        types, precision = self._section("data_types"), str(self._flags["precision"].value)
        own = "fp32" if precision == "fp32" else precision[:4]
        dtype = {key: self._dtype(types.get(key), f"data_types.{key}") for key in ("grad_accum_dtype", "param_dtype")}
        if dtype["param_dtype"] not in (None, own):
            raise SpecError(f"{self._where}: data_types.param_dtype={dtype['param_dtype']!r}, but the weights are {own}")
        accumulated = dtype["grad_accum_dtype"]
        if accumulated not in (None, own, "fp32"):
            raise SpecError(f"{self._where}: data_types.grad_accum_dtype={accumulated!r} beside {own} weights is not modelled")
        if accumulated is not None:
            self._set_option("grad_accum_dtype", "data_types.grad_accum_dtype", "param" if accumulated == own else "fp32")
        communicated = self._dtype(self._data.get("communication_data_type"), "communication_data_type")
        if communicated not in (None, own):
            raise SpecError(f"{self._where}: communication_data_type={communicated!r} beside {own} weights is not modelled")

    def _read_clipping(self) -> None:
        """Check gradient clipping, which needs no memory: DeepSpeed computes norms anyway and clips in place."""
        limit = self._data.get("gradient_clipping", 0.0)
        if limit == _AUTO:
            return
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 0:
            raise SpecError(f"{self._where}: gradient_clipping={shown(limit)} is not a number from 0 on")
        norm = self._options.get("compute_grad_norm")
        if limit and norm is not None and norm.value is False:
            raise SpecError(f"{self._where}: gradient_clipping={limit} needs the norm that compute_grad_norm=false leaves out")

    # Types

    def _section(self, key: str) -> dict[str, object]:
        value = self._data.get(key)
        return {} if value is None else self._object(value, key)

    def _object(self, value: object, key: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise SpecError(f"{self._where}: {key}={shown(value)} is not a JSON object")
        return value

    def _switch(self, value: object, key: str) -> bool | None:
        if value == _AUTO:
            return None
        if not isinstance(value, bool):
            raise SpecError(f"{self._where}: {key}={shown(value)} is neither true nor false")
        return value

    def _whole(self, value: object, key: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(f"{self._where}: {key}={shown(value)} is not a whole number")
        return value

    def _count(self, key: str) -> int | None:
        value = self._data.get(key)
        if value is None or value == _AUTO:
            return None
        count = self._whole(value, key)
        if not 1 <= count <= 10**15:
            raise SpecError(f"{self._where}: {key}={shown(value)} is not from 1 to 1e15")
        return count

    def _dtype(self, value: object, key: str) -> str | None:
        if value is None or value == _AUTO:
            return None
        if not isinstance(value, str) or value not in _DTYPES:
            raise SpecError(f"{self._where}: {key}={shown(value)} is none of {', '.join(dict.fromkeys(_DTYPES.values()))}")
        return _DTYPES[value]


def _is_off(value: object, harmless: object) -> bool:
    """Whether a value turns its key's feature off."""
    if harmless is True:
        return value is None or value is True or value == _AUTO
    if isinstance(value, dict):
        switch = next((key for key in ("enabled", "device", "autotp_size") if key in value), None)
        return not value if switch is None else _is_off(value[switch], harmless)
    return not value or value in (_AUTO, "none") or (not isinstance(value, bool) and value == harmless)


def _option_keys() -> Iterator[tuple[str, str]]:
    """Yield the keys of ``zero_optimization`` with their options; ``stage3_`` keys also without their prefix."""
    for field in fields(DeepSpeedOptions):
        ours = ("grad_accum_dtype", "torch_adam", "zero_init", "flatten_on_accelerator", "gpus_per_node")
        if field.name not in ours and not field.name.startswith("offload_"):
            yield field.name, field.name
            if field.name.startswith("stage3_"):
                yield field.name.removeprefix("stage3_"), field.name


_OPTION_OF = dict(_option_keys())
_DTYPES = {
    spelt: name
    for name, spellings in (
        ("fp32", ("fp32", "float32", "float", "torch.float32")),
        ("bf16", ("bf16", "bfloat16", "torch.bfloat16")),
        ("fp16", ("fp16", "float16", "half", "torch.float16")),
    )
    for spelt in spellings
}

#: Keys of a section that only NVMe reads.
_NVME_KEYS = {
    "offload_optimizer": ("buffer_count", "pipeline_read", "pipeline_write"),
    "offload_param": ("buffer_count", "buffer_size", "max_in_cpu"),
}

#: Keys of other sections that change memory and have no field in a job.
_INNER_REFUSED = (
    ("activation_checkpointing", "partition_activations"), ("activation_checkpointing", "cpu_checkpointing"),
    ("activation_checkpointing", "contiguous_memory_optimization"), ("fp16", "fp16_master_weights_and_grads"),
    ("bf16", "immediate_grad_update"), ("compile", "deepcompile"), ("data_types", "keep_in_fp32_modules"),
)  # fmt: skip
