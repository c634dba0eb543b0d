"""Reads a job from a torchtitan configuration.

Up to 0.2 the configuration is a TOML file (config/job_config.py). Since 0.3 it is a Python function; torchtitan saves the result as
JSON with ``debug.save_config_file`` (trainer.py, ``Trainer.Config.to_dict``), as 0.2 does with ``job.save_config_file``. zeroplan
reads both, with torchtitan's defaults for keys left out. Of torchtitan's own modules, Llama 3 is modelled; others are counted as
transformers' modules.
"""

from pathlib import Path

from zeroplan.catalog.setups.keys import keys_of
from zeroplan.catalog.setups.settings import COMPILED, NO_GPUS, Reading, Table
from zeroplan.catalog.setups.setup import OwnModules, Setting, Setup, TorchtitansModules
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError
from zeroplan.spec.compiled import COMPILED_BLOCKS, COMPILED_LOSS
from zeroplan.spec.pipeline import TORCHS_NAMES

#: Published models by torchtitan's module and flavour (0.3, models/<module>/config_registry.py).
MODELS = {
    ("llama3", "8B"): "llama-3.1-8b", ("llama3", "70B"): "llama-3.1-70b", ("llama3", "405B"): "llama-3.1-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b", ("qwen3", "1.7B"): "qwen3-1.7b", ("qwen3", "4B"): "qwen3-4b", ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b", ("qwen3", "32B"): "qwen3-32b", ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b", ("deepseek_v3", "671B"): "deepseek-v3", ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}  # fmt: skip
_GRAPHS = "CUDA graphs, which torchtitan captures unless training.disable_cuda_graphs is true, hold memory that is not counted"
#: Default of ``selective_ac_option`` (0.2, config/job_config.py).
_DEFAULT_OPTION = "2"
_MORE_IS_KEPT = (
    "torchtitan's selective recomputation is --recompute selective; what 0.3 also keeps of products with biases and of experts is "
    "not counted"
)
_OWN_MODULES = "torchtitan's own modules are counted as transformers' are, which save a little more or less"

#: The tables that are read, each with a section of its own in ``keys.toml``.
_TABLES = ("training", "parallelism", "model", "model_spec", "optimizer", "compile")
#: Default of ``training.local_batch_size``.
_DEFAULT_BATCH = 8
_SCHEDULES = {theirs.lower(): ours for ours, theirs in TORCHS_NAMES.items()}
#: Keys that set the layers of pipeline stages by hand, and the values that leave the default cut.
_CUT: dict[str, tuple[object, ...]] = {
    "pipeline_parallel_layers_per_stage": (), "module_fqns_per_model_part": (), "pipeline_parallel_split_points": (),
    "pipeline_parallel_first_stage_less_layers": (1,), "pipeline_parallel_last_stage_less_layers": (1,),
}  # fmt: skip


class _Reading(Reading):
    """The settings read so far, the file's tables, and the number of GPUs in the user's flags."""

    def __init__(self, whole: Table, gpus: int | None) -> None:
        super().__init__(whole)
        self.gpus = gpus
        self.tables = {name: whole.table(name) for name in _TABLES}
        self.instead = [_OWN_MODULES]
        """The notes if transformers' modules are counted instead of torchtitan's."""


def torchtitan_setup(whole: Table, _: Path, gpus: int | None) -> Setup:
    """Return the job in the file; raises SpecError for settings that are not modelled. ``gpus``: GPUs in the user's flags."""
    reading = _Reading(whole, gpus)
    _refuse(reading)
    data_parallel = _degrees(reading)
    for read in (_precision, _recomputation, _optimizer, _loss, _model):
        read(reading)
    _batch(reading, data_parallel)
    _selective_in_float8(reading)
    for name, table in reading.tables.items():
        table.leave(keys_of(f"torchtitan-{name}").known.split())
        reading.notes += table.unknown()
    whole.judge("torchtitan")
    setup, instead = reading.setup("torchtitan"), tuple(reading.instead)
    if own := _own_modules(reading):
        compiled = _compiled(reading)
        return setup._replace(own=OwnModules(own, (*instead, COMPILED) if compiled else instead, compiled))
    return setup._replace(notes=(*instead, *setup.notes))


def _own_modules(reading: _Reading) -> TorchtitansModules | None:
    """Return torchtitan's own modules where they are modelled: Llama 3, of 0.2 or of 0.3, which saves a ``model_spec``."""
    if (spec := reading.tables["model_spec"]).data:
        return "torchtitan-0.3" if spec.text("name") == "llama3" else None
    return "torchtitan" if reading.tables["model"].text("name") == "llama3" else None


def _compiled(reading: _Reading) -> tuple[str, ...]:
    """Return what it compiles: each block by itself, and the loss (config/job_config.py, Compile.components)."""
    table = reading.tables["compile"]
    if not table.switch("enable"):
        return ()
    components = table.get("components") or ("model", "loss")
    return tuple(part for name, part in (("model", COMPILED_BLOCKS), ("loss", COMPILED_LOSS)) if name in components)  # type: ignore[operator]  # a list


def _selective_in_float8(reading: _Reading) -> None:
    """Read compiled blocks at once: without them selective recomputation in float8 is not modelled."""
    again, parts = reading.flags.get("recompute"), _compiled(reading)
    selective = again is not None and again.value == "selective"
    if selective and "float8_recipe" in reading.flags and COMPILED_BLOCKS in parts and _own_modules(reading) == "torchtitan":
        reading.set("fused_kernels", "compile.enable", ",".join(parts), filled=True)


def _refuse(reading: _Reading) -> None:
    """Note or refuse settings that change memory in a way that is not modelled, and read float8."""
    whole = reading.table
    if reading.tables["compile"].switch("enable") and _own_modules(reading) is None:
        reading.set_compiled(reading.tables["compile"], "enable")
    _float8(reading)
    for name in ("optimizer", "parallelism"):
        reading.tables[name].judge(f"torchtitan-{name}")
    whole.matters |= reading.tables["parallelism"].matters
    if whole.table("fault_tolerance").switch("enable"):
        raise whole.table("fault_tolerance").refused("enable")
    if reading.tables["training"].switch("disable_cuda_graphs") is False:
        reading.notes.append(_GRAPHS)
    whole.leave(("quantize", "float8", "mx", "experimental"))  # they act through model.converters


def _float8(reading: _Reading) -> None:
    """Read torchao's float8 from ``quantize.linear.float8`` or, before 0.2, ``float8``; refuse all other converters."""
    model = reading.tables["model"]
    if model.get("converters") not in (["float8"], ["quantize.linear.float8"]):
        model.refuse({"converters": ()})
        return
    quantize = reading.table.get("quantize")
    linear = quantize.get("linear") if isinstance(quantize, dict) else None
    found = linear.get("float8") if isinstance(linear, dict) else reading.table.get("float8")
    table = Table(found if isinstance(found, dict) else {}, reading.table.where, "float8.")
    recipe = table.text("recipe_name") or "tensorwise"
    if recipe not in ("tensorwise", "rowwise"):
        raise table.refused("recipe_name", "use tensorwise or rowwise")
    reading.set("float8_recipe", "model.converters", recipe)
    reading.notes.append("float8 is counted for all linear layers of the blocks; filter_fqns is ignored")
    if table.switch("enable_fsdp_float8_all_gather"):
        reading.options["fsdp2.float8_all_gather"] = Setting("float8.enable_fsdp_float8_all_gather", value=True)


def _degrees(reading: _Reading) -> int:
    """Read degrees of parallelism, GPUs and engine; returns the data-parallel ranks."""
    table, names = reading.tables["parallelism"], {}
    for name in ("tensor", "context", "pipeline", "expert"):
        names[name] = table.count(f"{name}_parallel_degree") or 1
        if names[name] > 1:
            reading.set(f"{name}_parallel", f"parallelism.{name}_parallel_degree", names[name])
    replicas = table.count("data_parallel_replicate_degree") or 1
    shards = table.count("data_parallel_shard_degree", least=-1)
    others = replicas * names["tensor"] * names["context"] * names["pipeline"]
    is_left, key = shards in (None, -1), "parallelism.data_parallel_shard_degree"
    shards = _left_over(reading, others) if is_left else shards or 1
    if not is_left or reading.gpus is not None:
        reading.set("gpus", key, others * shards)
    elif others > 1:
        reading.set("gpus", key, others, filled=True, note=NO_GPUS.format(others))
    sharded = shards * names["context"] > 1
    _engine(reading, replicas, sharded=sharded, pipelined=names["pipeline"] > 1)
    if names["context"] > 1:
        table.refuse({"context_parallel_rotate_method": ("allgather",), "context_parallel_load_balancer": ("headtail",)})
    _pipeline(reading, pipelined=names["pipeline"] > 1)
    return replicas * shards


def _pipeline(reading: _Reading, *, pipelined: bool) -> None:
    """Read the pipeline's schedule, and refuse stages cut by hand."""
    table = reading.tables["parallelism"]
    table.leave(("pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "num_pp_microbatches", *_CUT))
    if not pipelined:
        return
    table.refuse(_CUT)
    word = table.text("pipeline_parallel_schedule") or "1F1B"
    if word.lower() not in _SCHEDULES:
        raise table.refused("pipeline_parallel_schedule", "use 1F1B, GPipe or Interleaved1F1B")
    reading.set("pipeline_schedule", "parallelism.pipeline_parallel_schedule", _SCHEDULES[word.lower()])


def _left_over(reading: _Reading, others: int) -> int:
    """Return the degree that -1 stands for: the GPUs divided by the other degrees; 1 without a number of GPUs."""
    if reading.gpus is None:
        return 1
    if reading.gpus % others:
        raise SpecError(
            f"{reading.table.where}: --gpus {reading.gpus} is not divisible by its other degrees, {others} together"
        )
    return reading.gpus // others


def _engine(reading: _Reading, replicas: int, *, sharded: bool, pipelined: bool) -> None:
    """Read the engine and stage: FSDP2 if ``sharded``, else DDP (parallelize.py)."""
    table = reading.tables["parallelism"]
    word = table.text("fsdp_reshard_after_forward") or "default"
    if word not in ("default", "always", "never"):
        raise table.wrong("fsdp_reshard_after_forward", "default, always or never")
    key = "parallelism.data_parallel_shard_degree"
    if not sharded:
        reading.set("engine", key, "ddp")
        reading.set("stage", key, 0)
        return
    reading.set("engine", key, "fsdp2")
    reading.own_units = "torchtitan"
    keeps = word == "never" or (word == "default" and pipelined)
    reading.set("stage", "parallelism.fsdp_reshard_after_forward", 2 if keeps else 3)
    if replicas > 1:
        reading.set("replicas", "parallelism.data_parallel_replicate_degree", replicas)
    if reading.tables["training"].switch("enable_cpu_offload"):
        reading.set_offload("training.enable_cpu_offload")


def _precision(reading: _Reading) -> None:
    table = reading.tables["training"]
    whole, mixed, reduced = (table.text(key) for key in ("dtype", "mixed_precision_param", "mixed_precision_reduce"))
    if reduced not in (None, "float32"):
        raise table.refused("mixed_precision_reduce", "use float32")
    for key, value in (("dtype", whole), ("mixed_precision_param", mixed)):
        if value not in (None, "float32", "bfloat16"):
            raise table.wrong(key, "float32 or bfloat16")
    table.switch("enable_cpu_offload")
    if whole == "bfloat16":
        reading.set("precision", "training.dtype", "bf16")
    else:
        reading.set("precision", "training.mixed_precision_param", "fp32" if mixed == "float32" else "bf16-mixed")


def _recomputation(reading: _Reading) -> None:
    value, key = reading.table.get("activation_checkpoint"), "activation_checkpoint"
    told_none = key in reading.table.data and value is None
    table = reading.table.table(key)
    mode = table.text("mode") or ("none" if told_none else _mode_of(table))
    reading.tables[key] = table
    option = table.get("selective_ac_option")
    table.leave(("force_recompute_mm_shapes_by_fqns",))
    if mode in ("none", "full"):
        reading.set("recompute", f"{key}.mode", mode)
    elif mode == "selective" and str(option) == "1":
        reading.set("recompute", f"{key}.selective_ac_option", "full")
    elif mode == "selective" and (option == "op" or _is_of_0_3(table)):
        reading.set("recompute", f"{key}.selective_ac_option", "selective", note=_MORE_IS_KEPT)
    elif mode == "selective":
        which = f"{key} is left out, which to torchtitan is selective" if not table.data else f"{key} is selective"
        reading.asks["recompute"] = (
            f"{which} by block, every {option or _DEFAULT_OPTION} of them again, and that is not modelled; set --recompute none, "
            "which keeps all and so takes more, or full"
        )
    elif mode == "memory_budget":
        raise table.refused("memory_budget", "use mode none or full")
    else:
        raise table.wrong("mode", "none, full or selective")


def _is_of_0_3(table: Table) -> bool:
    """Whether a saved configuration has 0.3's policy, always by operator; 0.2 writes a mode, or leaves the table out."""
    return bool(table.data) and "mode" not in table.data and "selective_ac_option" not in table.data


def _mode_of(table: Table) -> str:
    """Return the policy of a configuration without a mode, by the fields that 0.3 saves; selective is the default of both."""
    if "memory_budget" in table.data:
        return "memory_budget"
    if not table.data or {"force_recompute_mm_shapes_by_fqns", "selective_ac_option"} & table.data.keys():
        return "selective"
    return "full"


def _optimizer(reading: _Reading) -> None:
    table = reading.tables["optimizer"]
    groups, name = table.get("param_groups"), table.text("name")
    if isinstance(groups, list) and groups:
        names = {str(one.get("optimizer_name")) if isinstance(one, dict) else "?" for one in groups}
        if len(names) > 1:
            raise table.refused("param_groups", "use one optimizer for all")
        name = names.pop()
    words = {"AdamW": "adamw", "Adam": "adam"}
    if (name or "AdamW") not in words:
        raise SpecError(f"{reading.table.where}: optimizer {shown(name)} is not modelled; Adam and AdamW are")
    reading.set("optimizer", "optimizer.name", words[name or "AdamW"], filled=name is None)
    impls = {"fused": "fused", "foreach": "foreach", "for-loop": "forloop"}
    impl = table.text("implementation") or ("fused" if table.switch("fused") in (None, True) else "foreach")
    if impl not in impls:
        raise table.refused("implementation", f"use one of {', '.join(impls)}")
    reading.set("optimizer_impl", "optimizer.implementation", impls[impl])


def _loss(reading: _Reading) -> None:
    """Read the loss, since 0.3 also in chunks (components/loss.py, ChunkedLossWrapper); torchtitan releases its logits."""
    table = reading.table.table("loss")
    chunked = "loss_fn" in table.data
    reading.set("loss", "loss", "chunked" if chunked else "full", filled=not table.data)
    if chunked and (chunks := table.count("num_chunks")) not in (None, 8):
        reading.notes.append(f"loss.num_chunks is {chunks}: eight chunks are counted")
    if not chunked:
        reading.set("keep_logits", "loss", value=False, filled=True)


def _model(reading: _Reading) -> None:
    spec, model = reading.tables["model_spec"], reading.tables["model"]
    name, flavor = (spec.text(key) or model.text(key) for key in ("name", "flavor"))
    found = MODELS.get((name or "", flavor or ""))
    if found is not None:
        reading.set("model", f"model {name} {flavor}", found)
    elif name is not None or flavor is not None:
        reading.notes.append(f"model {name or ''} {flavor or ''} is torchtitan's own; its shape comes from the flags")


def _batch(reading: _Reading, ranks: int) -> None:
    """Read length and micro-batches; releases after 0.3 give a micro-batch in tokens instead of sequences."""
    table = reading.tables["training"]
    seq_key = "max_context_length" if "max_context_length" in table.data else "seq_len"
    seq = table.count(seq_key) or 2048
    tokens = table.count("num_tokens_per_microbatch_per_dp_rank")
    size_key = "local_batch_size" if "local_batch_size" in table.data else "batch_size"
    given = table.count(size_key)
    size = given or _DEFAULT_BATCH
    if tokens is not None:
        if tokens % seq:
            raise SpecError(f"{table.where}: {tokens} tokens per micro-batch are no whole sequences of {seq_key}={seq}")
        given = size = tokens // seq
        size_key = "num_tokens_per_microbatch_per_dp_rank"
    reading.set("seq_len", f"training.{seq_key}", seq, filled=seq_key not in table.data)
    through = _through_a_pipeline(reading, size, in_tokens=tokens is not None)
    steps = _steps(table, size * ranks * (through or 1 if tokens is not None else 1), size, ranks)
    if through is None:
        reading.set("micro_batch", f"training.{size_key}", size, filled=given is None)
        reading.set("grad_accum", "training.global_batch_size", steps)
        return
    if steps > 1:
        raise SpecError(
            f"{table.where}: a pipeline that runs {steps} times per step is not modelled; use a larger local_batch_size"
        )
    key = "parallelism.pipeline_parallel_microbatch_size"
    reading.set("micro_batch", key, size if tokens is not None else size // through)
    reading.set("grad_accum", key, through)


def _steps(table: Table, whole: int, size: int, ranks: int) -> int:
    """Return the accumulation steps: the global batch divided by ``whole``, the sequences that all ranks process at once."""
    total = table.count("global_batch_size", least=-1)
    if total is None or total < 0:
        return 1
    steps, left = divmod(total, whole)
    if left or not steps:
        raise SpecError(
            f"{table.where}: global_batch_size={total} is not {size} sequences x {ranks} data-parallel ranks, some times "
            "over; set --gpus if no degree contains it"
        )
    return steps


def _through_a_pipeline(reading: _Reading, size: int, *, in_tokens: bool) -> int | None:
    """Return the micro-batches in a pipeline, None without one. Up to 0.3 the pipeline divides a rank's batch."""
    table = reading.tables["parallelism"]
    if "pipeline_parallel" not in reading.flags:
        return None
    if in_tokens:
        return table.count("num_pp_microbatches") or 1
    each = table.count("pipeline_parallel_microbatch_size") or 1
    if size % each:
        raise SpecError(f"{table.where}: a batch of {size} is not divisible by pipeline_parallel_microbatch_size={each}")
    return size // each
