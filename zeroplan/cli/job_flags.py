"""The flags that describe a job, shared by every command that takes one, and how they become a request.

Each flag stands once, in ``FLAGS``. A command is written as a function of the resolved job; :func:`takes_a_job` gives it the
flags as its signature, so that help, completion and parsing come from the same table.
"""

import inspect
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.catalog.model import model as find_model
from zeroplan.cli import say
from zeroplan.cli.catalog_flags import Catalog, folder
from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.resolve import Request, Resolved, own_folder, resolve, with_fetched
from zeroplan.settings import with_setting
from zeroplan.spec.base import largest
from zeroplan.units import parse_count, parse_tokens

if TYPE_CHECKING:
    from zeroplan.from_run import FromRun
    from zeroplan.spec.job import JobSpec


class _Flag(NamedTuple):
    """One flag: the field of the request it sets, how its value looks, what it says."""

    field: str
    metavar: str
    help: str
    panel: str
    number: bool = False
    switch: bool = False


_MODEL, _CLUSTER, _RECIPE, _BATCH = "Model (one of the first four)", "Cluster", "Recipe", "Batch"
_SWITCHES = "Switches of the recipe"

FLAGS = (
    _Flag("params", "COUNT", "Parameters, as 7e9, 7b or 350M; a published shape of that size is taken.", _MODEL),
    _Flag("model", "NAME", "A model of the catalogue (`zeroplan models`), or hf:OWNER/NAME, from the Hugging Face Hub.", _MODEL),
    _Flag("config", "PATH", "A Hugging Face config.json, or a folder that holds one.", _MODEL),
    _Flag("profile", "FILE", "A profile of a module (`zeroplan profile`), for what has no formulas.", _MODEL),
    _Flag("treat_as", "FAMILY", "Read the config of an unknown architecture as this family.", _MODEL),
    _Flag("lora_rank", "N", "Fine-tune low-rank adapters of this rank, as peft's, everything else frozen.", _MODEL, number=True),
    _Flag("lora_targets", "NAMES", "The linear layers that have adapters: all-linear, attention, mlp, or names as "
          "q_proj,v_proj. (default: all-linear)", _MODEL),
    _Flag("quantize", "NAME", "Hold the frozen weights of the blocks in bitsandbytes' 4 bits (QLoRA): none, nf4, or nf4-double, "
          "their scales quantised too. (default: none)", _MODEL),
    _Flag("freeze", "NAMES", "Parts that are not trained: embedding, norm (the last) and head, separated by commas.", _MODEL),
    _Flag("freeze_layers", "N", "The first N blocks are not trained. (default: 0)", _MODEL, number=True),
    _Flag("gpus", "N", "GPUs in all. (default: 1)", _CLUSTER, number=True),
    _Flag("gpu", "NAME", "The GPU (`zeroplan gpus`), to see whether the job fits.", _CLUSTER),
    _Flag("gpus_per_node", "N", "GPUs that share a node. (default: the GPU's usual server)", _CLUSTER, number=True),
    _Flag("replicas", "N", "Replicas of the sharded group (HSDP). (default: 1)", _CLUSTER, number=True),
    _Flag("tensor_parallel", "N", "Tensor-parallel ranks (engines fsdp2, megatron, paper). (default: 1)", _CLUSTER, number=True),
    _Flag("context_parallel", "N", "Context-parallel ranks, which share a sequence. (default: 1)", _CLUSTER, number=True),
    _Flag("pipeline_parallel", "N", "Pipeline-parallel ranks, which split the layers. (default: 1)", _CLUSTER, number=True),
    _Flag("expert_parallel", "N", "Expert-parallel ranks, among those that shard. (default: 1)", _CLUSTER, number=True),
    _Flag("pipeline_schedule", "NAME", "gpipe, 1f1b, interleaved-1f1b, interleaved-zero-bubble or zbv. (default: 1f1b)", _RECIPE),
    _Flag("pipeline_stages_per_rank", "N", "Stages on each pipeline rank. (default: 1, or 2 where the schedule takes several)",
          _RECIPE, number=True),
    _Flag("pipeline_layers", "LIST", "Layers of each pipeline stage, as 7,9,9,7. (default: as torchtitan cuts them)", _RECIPE),
    _Flag("stage", "0..3", "ZeRO stage. (default: 3; 0 on one GPU and with ddp; 1 with megatron)", _RECIPE),
    _Flag("engine", "NAME", "paper, ddp, fsdp1, fsdp2, deepspeed or megatron. (default: ddp for stages 0 and 1, fsdp2 for 2 and 3)",
          _RECIPE),
    _Flag("precision", "NAME", "bf16-mixed, fp16-mixed, bf16 or fp32. (default: bf16-mixed)", _RECIPE),
    _Flag("optimizer", "NAME",
          "adamw, adam, sgd, sgd-momentum, adagrad, rmsprop, adafactor, lion, muon or adamw-8bit. (default: adamw)",
          _RECIPE),
    _Flag("optimizer_impl", "NAME", "How it steps: foreach, fused or forloop. (default: the engine's own)", _RECIPE),
    _Flag("offload_optimizer", "DEVICE", "Where the optimizer's states are, the CPU taking the step: none, cpu or nvme. "
          "(default: none)", _RECIPE),
    _Flag("offload_param", "DEVICE", "Where this rank's share of the parameters is: none, cpu or nvme. (default: none)", _RECIPE),
    _Flag("from_file", "FILE", "An existing set-up: DeepSpeed's configuration, accelerate's YAML, TrainingArguments as JSON, "
          "torchtitan's configuration; flags must not contradict it.", _RECIPE),
    _Flag("deepspeed_config", "FILE", "A DeepSpeed configuration (JSON), \"auto\" as transformers' Trainer fills it in; flags "
          "must not contradict it.", _RECIPE),
    _Flag("recompute", "NAME", "Activation checkpointing: none, selective or full. (default: none)", _RECIPE),
    _Flag("recompute_layers", "N", "Of the first N blocks alone. (default: of all)", _RECIPE, number=True),
    _Flag("attention", "NAME", "sdpa, flash or eager. (default: sdpa)", _RECIPE),
    _Flag("loss", "NAME", "full (all logits at once), chunked (torchtitan) or fused (Liger). (default: full)", _RECIPE),
    _Flag("keep_logits", "NAME", "Whether the loop holds the model's output during backward: no, yes, or fp32, upcast as "
          "accelerate's does. (default: no)", _RECIPE),
    _Flag("modules", "NAME", "Whose modules train: transformers, or torchtitan's own Llama 3 (engine fsdp2). "
          "(default: transformers, or those of the program whose file --from reads)", _RECIPE),
    _Flag("activations", "NAME", "Count them by the module, or by megatron, its paper's formula (engine paper). "
          "(default: module)", _RECIPE),
    _Flag("offload_activations", "", "Keep what blocks save for their backward in pinned host memory until then (torch's "
          "offload_wrapper around every block).", _SWITCHES, switch=True),
    _Flag("sequence_parallel", "", "Megatron's formulas: split norms and dropouts over tensor-parallel ranks too.",
          _SWITCHES, switch=True),
    _Flag("sync_every_micro_batch", "", "Reduce gradients after every micro-batch (default), or with "
          "--no-sync-every-micro-batch after the last one only (no_sync).", _SWITCHES, switch=True),
    _Flag("seq_len", "TOKENS", "Tokens per sequence. (default: 4096, or the model's longest)", _BATCH, number=True),
    _Flag("micro_batch", "N", "Sequences in one forward pass of a data-parallel rank: a GPU, or those that split a model or a "
          "sequence. (default: 1)", _BATCH, number=True),
    _Flag("grad_accum", "N", "Micro-batches per optimizer step. (default: 1)", _BATCH, number=True),
)  # fmt: skip


def takes_a_job(
    command: Callable[..., int | None], *, or_none: bool = False, gpus_as: str = "", traces: bool = True
) -> Callable[..., int | None]:
    """Give a command ``f(resolved, **own)`` the job's flags beside its own, and hand it the resolved job.

    ``or_none`` hands it None where nothing is said of a job. Arguments of its own without a default come before the job file.
    ``gpus_as`` is a flag of the command's own that says how many GPUs, too. ``traces`` says whether a model without formulas is
    traced.
    """

    def resolved(given: dict[str, object], mine: dict[str, object]) -> Resolved | None:
        said = any(given[name] is not None for name in given if name != "catalog")
        given = _with_gpus(given, gpus_as, mine.get(gpus_as))
        return _resolved(given, traces=traces) if said or not or_none else None

    return _with_flags(command, "resolved", resolved)


_ReadFile = Callable[[Path], Request]


def takes_a_request(command: Callable[..., int | None], *, read_file: _ReadFile | None = None) -> Callable[..., int | None]:
    """Give a command ``f(asked, **own)`` the job's flags beside its own, and hand it what was said, not yet completed.

    ``read_file`` reads its argument where that may be something else than a job file.
    """
    return _with_flags(command, "asked", lambda given, _: _traced(_asked(given, read_file), every=True))


_Read = Callable[[dict[str, object], dict[str, object]], object]


def _with_flags(command: Callable[..., int | None], name_of_job: str, read: _Read) -> Callable[..., int | None]:
    own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != name_of_job]
    first = [parameter for parameter in own if parameter.default is inspect.Parameter.empty]

    def run(**given: object) -> int | None:
        mine = {parameter.name: given.pop(parameter.name) for parameter in own}
        return command(**{name_of_job: read(given, mine)}, **mine)

    parameters = [
        *first,
        _job_file(),
        *(_parameter(flag) for flag in FLAGS),
        _from_run_parameter(),
        _set_parameter(),
        _keyword("catalog", Catalog, None),
        *(parameter for parameter in own if parameter not in first),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = command.__doc__
    return run


def _with_gpus(given: dict[str, object], flag: str, ranks: object) -> dict[str, object]:
    if ranks is None:
        return given
    if given["gpus"] not in (None, ranks):
        raise SpecError(f"--{flag} {ranks} and --gpus {given['gpus']} are two numbers of GPUs; leave one of them out")
    return {**given, "gpus": ranks}


def _keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _job_file() -> inspect.Parameter:
    argument = typer.Argument(metavar="[JOB]", help="A job as a TOML or JSON file; flags override it.", show_default=False)
    return _keyword("job_file", Annotated[str | None, argument], None)


def _parameter(flag: _Flag) -> inspect.Parameter:
    name = "--from" if flag.field == "from_file" else "--" + flag.field.replace("_", "-")
    if flag.switch:
        option = typer.Option(f"{name}/--no-{name[2:]}", help=flag.help, rich_help_panel=flag.panel, show_default=False)
        return _keyword(flag.field, Annotated[bool | None, option], None)
    option = typer.Option(name, metavar=flag.metavar, help=flag.help, rich_help_panel=flag.panel, show_default=False)
    return _keyword(flag.field, Annotated[str | None, option], None)


def _from_run_parameter() -> inspect.Parameter:
    help_text = "A saved dry run of your own script (`zeroplan dryrun --save FILE --profile own`); flags override its settings."
    option = typer.Option("--from-run", metavar="FILE", help=help_text, rich_help_panel=_MODEL, show_default=False)
    return _keyword("from_run", Annotated[str | None, option], None)


def _set_parameter() -> inspect.Parameter:
    help_text = "An engine's own option, as deepspeed.reduce_bucket_size=5e7 or fsdp2.reshard_after_forward=8; repeatable."
    option = typer.Option("--set", metavar="KEY=VALUE", help=help_text, rich_help_panel=_RECIPE, show_default=False)
    return _keyword("settings", Annotated[list[str] | None, option], None)


class Asked(NamedTuple):
    """What was said of a job: flags over a job file or a run, the user's own catalogue, the engine's options set one by one."""

    request: Request
    extra: Path | None
    chosen: tuple[str, ...]
    run: "FromRun | None" = None
    said: Request = Request()
    """The flags alone."""
    notes: tuple[str, ...] = ()
    """What was done to answer, which the answer must say."""

    def to_search(self, looked_for: Collection[str]) -> Request:
        """The request for a plan, which decides what of a run's settings no flag says, and looks for some."""
        return self.request if self.run is None else self.run.to_search(self.said, looked_for)

    def how_sure(self, job: "JobSpec") -> tuple[str, ...]:
        """What must be known of an answer that comes from a run, or from a trace of the model; empty where neither does."""
        return self.notes if self.run is None else self.run.how_sure(job)


def _traced(asked: Asked, *, every: bool) -> Asked:
    """What was said, with the profile of a model that has no formulas; for ``every`` engine and recomputation, or for its own."""
    if asked.request.config is None and asked.request.fetched is None:
        return asked
    from zeroplan.auto_profile import with_own_profile  # noqa: PLC0415  few models need it

    request, notes = with_own_profile(asked.request, say=say, chosen=asked.chosen, every=every)
    return asked._replace(request=request, notes=notes)


def _resolved(given: dict[str, object], *, traces: bool) -> Resolved:
    asked = _asked(given)
    asked = _traced(asked, every=False) if traces else asked
    found = resolve(asked.request, extra=asked.extra, chosen=asked.chosen)
    return found._replace(notes=(*asked.how_sure(found.job), *found.notes))


def _asked(given: dict[str, object], read_file: _ReadFile | None = None) -> Asked:
    catalog, from_run = given.pop("catalog"), given.pop("from_run")
    settings = given.pop("settings")
    settings = settings if isinstance(settings, (list, tuple)) else []
    job_file = given.pop("job_file")
    said = {flag.field: _value(flag, given[flag.field]) for flag in FLAGS if given[flag.field] is not None}
    stated = Request(**said)  # type: ignore[arg-type]  # Request checks every field
    run = None if from_run is None else _run(str(from_run), said, job_file)
    if run is not None:
        request = run.overridden_by(stated)
    else:
        request = (_from_file(str(job_file), read_file) if job_file is not None else Request()).overridden_by(stated)
    extra = folder(None if catalog is None else str(catalog))
    request = _looked_up(request, extra) if "model" in said else request
    for setting in settings:
        request = with_setting(request, str(setting))
    chosen = tuple(str(setting).partition("=")[0].removeprefix("deepspeed.") for setting in settings)
    return Asked(request, extra, chosen, run, stated)


def _run(path: str, said: dict[str, object], job_file: object) -> "FromRun":
    """The run at a path; SpecError where something else says what is trained, too."""
    other = next((name for name in (*WAYS_TO_NAME, "from_file", "deepspeed_config") if name in said), None)
    if other is not None or job_file is not None:
        flag = f"--{other.removesuffix('_file').replace('_', '-')}" if other else f"job file {str(job_file)!r}"
        raise SpecError(f"--from-run {path!r} and {flag} both say what is trained; leave one of them out")
    from zeroplan.from_run import FromRun  # noqa: PLC0415  only this flag pays for it
    from zeroplan.saved_runs.files import read_saved  # noqa: PLC0415

    run = FromRun(read_saved(Path(path)), path)
    say(run.remainder)
    return run


def _looked_up(request: Request, extra: Path | None) -> Request:
    """The request with what its flag ``--model`` names beyond the catalogue: a model of the Hub's, or by mistake a file."""
    if _exists(Path(str(request.model))):
        try:
            find_model(str(request.model), extra=own_folder(extra, "models"))
        except UnknownNameError as unknown:
            raise UnknownNameError(f"{unknown}; there is a file or folder of this name, which goes to --config") from None
    return with_fetched(request, extra=extra)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


#: ``8xH100``, as clouds and papers write it; ``0x10`` is no number of GPUs.
_NUMBER_AND_NAME = re.compile(r"([1-9][0-9]*) ?[xX*] ?(\S.*)")
_KEEP_LOGITS: dict[str, bool | str] = {"no": False, "yes": True, "fp32": "fp32"}


def _value(flag: _Flag, text: object) -> object:
    if flag.switch:
        return text
    if flag.field == "keep_logits":
        return _kept(str(text))
    if flag.field in ("gpus", "gpu") and (both := _NUMBER_AND_NAME.fullmatch(str(text))):
        raise SpecError(f"--{flag.field} {text!r} says two things; write --gpus {both[1]} --gpu {both[2]}")
    if flag.field == "seq_len":
        return parse_tokens(str(text), what="--seq-len", most=_most(flag))
    if flag.number:
        return parse_count(str(text), what="--" + flag.field.replace("_", "-"), examples="8 or 1024", most=_most(flag))
    return int(text) if flag.field == "stage" and str(text) in ("0", "1", "2", "3") else text  # type: ignore[call-overload]


def _kept(text: str) -> bool | str:
    if text not in _KEEP_LOGITS:
        near = {"true": "; write yes", "false": "; write no"}.get(text.lower(), "")
        raise SpecError(f"--keep-logits {text!r} is none of {', '.join(_KEEP_LOGITS)}{near}")
    return _KEEP_LOGITS[text]


def _most(flag: _Flag) -> int:
    """The largest number that a flag's field takes."""
    return largest(Request, flag.field) or 10**18


def _from_file(text: str, read_file: _ReadFile | None) -> Request:
    if not text:
        raise SpecError("job file '' is no file; give the path of one")
    if read_file is not None:
        return read_file(Path(text))
    from zeroplan.job_file import read_job_file  # noqa: PLC0415  only a job file pays for it

    return read_job_file(Path(text))
