"""The flags that describe a job, shared by many commands, and how they become a request.

Each flag is a field of :class:`~zeroplan.resolve.Request`. A command is a function of the resolved job. :func:`with_job_flags` puts
the flags into its signature, so that help, completion and parsing come from the same declarations.
"""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer.models import ArgumentInfo

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.catalog.model import model as find_model
from zeroplan.catalog.text import is_there
from zeroplan.cli import say
from zeroplan.cli.flags import Catalog, described, folder, keyword
from zeroplan.cli.quick import ALL_FLAGS
from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.resolve import OPTIONS, Request, Resolved, own_folder, resolve, with_fetched
from zeroplan.resolve.options import KEEP_LOGITS, MODEL, RECIPE, Declared
from zeroplan.settings import with_setting
from zeroplan.spec.base import bounds_of
from zeroplan.units import parse_count, parse_tokens

if TYPE_CHECKING:
    from zeroplan.from_run import FromRun
    from zeroplan.spec.job import JobSpec


FLAGS = tuple(one for one in OPTIONS.values() if one.help)
_OFTEN_NEEDED = frozenset({
    "--model", "--params", "--config", "--gpu", "--gpus", "--stage", "--engine", "--from", "--seq-len", "--micro-batch",
    "--recompute", "--lora-rank",
})  # fmt: skip
"""The flags that ``--help`` explains; ``--help-all`` explains all flags."""
_OF_COMMANDS = frozenset({
    "--search-optimizer", "--mfu", "--margin", "--calibrate", "--measured", "--measured-job", "--slurm", "--partition", "--account",
    "--time-limit", "--slurm-option", "--resume", "--as-rank", "--of", "--timeout",
})  # fmt: skip
"""Flags of ``plan`` and ``verify`` beside the job's that few people need."""
_RARELY_NEEDED = frozenset({"--from-run", "--set", "--catalog", *_OF_COMMANDS, *(one.flag for one in FLAGS)}) - _OFTEN_NEEDED


def with_job_flags(
    command: Callable[..., int | None], *, or_none: bool = False, gpus_as: str = "", traces: bool = True
) -> Callable[..., int | None]:
    """Return ``f(resolved, **own)`` as a command with the job's flags beside its own; ``resolved`` is the resolved job.

    ``or_none``: None instead of a job if no flag of a job is given. The command's own arguments come before the job file.
    ``gpus_as``: a flag of the command that also sets the number of GPUs. ``traces``: whether to trace a model without formulas.
    """

    def resolved(given: dict[str, object], mine: dict[str, object]) -> Resolved | None:
        any_given = any(given[name] is not None for name in given if name != "catalog")
        given = _with_gpus(given, gpus_as, mine.get(gpus_as))
        return _resolved(given, traces=traces) if any_given or not or_none else None

    return _with_flags(command, "resolved", resolved)


_ReadFile = Callable[[Path], Request]


def with_request_flags(command: Callable[..., int | None], *, read_file: _ReadFile | None = None) -> Callable[..., int | None]:
    """Return ``f(job_request, **own)`` as a command with the job's flags beside its own, and with the unresolved request.

    ``read_file`` reads the argument if it may be another file than a job file.
    """
    return _with_flags(command, "job_request", lambda given, _: _traced(_job_request(given, read_file), every=True))


class Shared(NamedTuple):
    """Flags that apply to both of two jobs, not yet resolved."""

    given: dict[str, object]

    @property
    def said(self) -> bool:
        """Whether any flag was given."""
        return any(value not in (None, (), []) for name, value in self.given.items() if name != "catalog")

    def beside(self, words: Sequence[str]) -> "Shared":
        """Return the flags overridden by further flags of one of the two jobs."""
        if not words:
            return self
        from zeroplan.cli.quick import as_command  # noqa: PLC0415  only flags of one job need it

        command = as_command("diff", _with_flags(lambda: None, "", lambda *_: None, with_file=False))
        own = command.make_context("diff", [*words], parent=command.make_context("zeroplan", [])).params
        settings = [*_listed(self.given["settings"]), *_listed(own["settings"])]
        if not any(word.startswith("--catalog") for word in words):
            own["catalog"] = None  # the environment's catalogue is already in the shared flags
        set_now = {name: value for name, value in own.items() if value is not None}
        given = self.given
        if set_now.keys() & set(WAYS_TO_NAME):  # a model in the further flags replaces all flags of the model
            given = {**given, **dict.fromkeys((*WAYS_TO_NAME, "treat_as"))}
        return Shared({**given, **set_now, "settings": settings or None})

    def resolved(self, request: Request | None, name: str) -> Resolved:
        """Return the complete job of a file's request overridden by these flags, or of the flags alone."""
        given = {**self.given, "job_file": None if request is None else name}
        return _resolved(given, traces=True, read_file=None if request is None else lambda _: request)


def with_flags_of_two_jobs(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return ``f(shared, **own)`` as a command with the job's flags beside its own; ``shared`` has the flags of both jobs."""
    return _with_flags(command, "shared", lambda given, _: Shared(given), with_file=False)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []


_Read = Callable[[dict[str, object], dict[str, object]], object]


def _with_flags(
    command: Callable[..., int | None], name_of_job: str, read: _Read, *, with_file: bool = True
) -> Callable[..., int | None]:
    own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != name_of_job]
    first = [
        one
        for one in own
        if any(isinstance(annotation, ArgumentInfo) for annotation in getattr(one.annotation, "__metadata__", ()))
    ]

    def run(*, help_all: bool = False, **given: object) -> int | None:  # noqa: ARG001  its callback has already ended the program
        mine = {parameter.name: given.pop(parameter.name) for parameter in own}
        return command(**{name_of_job: read(given, mine)}, **mine)

    parameters = [
        *first,
        *([_job_file()] if with_file else []),
        *(_parameter(flag) for flag in FLAGS),
        _from_run_parameter(),
        _set_parameter(),
        keyword("catalog", Catalog, None),
        _help_parameter(),
        *(parameter for parameter in own if parameter not in first),
    ]
    run.rarely_needed = _RARELY_NEEDED  # type: ignore[attr-defined]  # what the command leaves out of its help
    return described(run, parameters, command.__doc__)


def _with_gpus(given: dict[str, object], flag: str, ranks: object) -> dict[str, object]:
    if ranks is None:
        return given
    if given["gpus"] not in (None, ranks):
        raise SpecError(f"--{flag} {ranks} and --gpus {given['gpus']} are two numbers of GPUs; leave one of them out")
    return {**given, "gpus": ranks}


def _job_file() -> inspect.Parameter:
    argument = typer.Argument(metavar="[JOB]", help="A job as a TOML or JSON file; flags override it.", show_default=False)
    return keyword("job_file", Annotated[str | None, argument], None)


def _parameter(one: Declared) -> inspect.Parameter:
    flag, panel = one.flag, one.option.panel
    if one.is_switch:
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=one.help, rich_help_panel=panel, show_default=False)
        return keyword(one.field, Annotated[bool | None, option], None)
    option = typer.Option(flag, metavar=one.option.metavar, help=one.help, rich_help_panel=panel, show_default=False)
    return keyword(one.field, Annotated[str | None, option], None)


def _from_run_parameter() -> inspect.Parameter:
    help_text = "A saved dry run of your own script (`zeroplan dryrun --save FILE --profile own`); flags override its settings."
    option = typer.Option("--from-run", metavar="FILE", help=help_text, rich_help_panel=MODEL, show_default=False)
    return keyword("from_run", Annotated[str | None, option], None)


def _help_parameter() -> inspect.Parameter:
    option = typer.Option("--help-all", is_eager=True, callback=_explain_all, help="Explain every flag, and exit.")
    return keyword("help_all", Annotated[bool, option], False)


def _explain_all(context: typer.Context, given: bool) -> None:
    if given:
        context.meta[ALL_FLAGS] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _set_parameter() -> inspect.Parameter:
    help_text = "An engine's own option, as deepspeed.reduce_bucket_size=5e7 or fsdp2.reshard_after_forward=8; repeatable."
    option = typer.Option("--set", metavar="KEY=VALUE", help=help_text, rich_help_panel=RECIPE, show_default=False)
    return keyword("settings", Annotated[list[str] | None, option], None)


class JobRequest(NamedTuple):
    """A job's request (flags over a job file or a run), the user's catalogue, and the names of options from `--set`."""

    request: Request
    extra: Path | None
    chosen: tuple[str, ...]
    run: "FromRun | None" = None
    said: Request = Request()
    """Only the flags' values."""
    notes: tuple[str, ...] = ()
    """Notes for the answer, such as on a trace."""

    def to_search(self, looked_for: Collection[str]) -> Request:
        """The request for a plan: a run's settings that the plan searches are left open unless a flag sets them."""
        return self.request if self.run is None else self.run.to_search(self.said, looked_for)

    def how_sure(self, job: "JobSpec") -> tuple[str, ...]:
        """Remarks on the accuracy of an answer from a saved run or a trace; empty without either."""
        return self.notes if self.run is None else self.run.how_sure(job)


def _traced(job_request: JobRequest, *, every: bool) -> JobRequest:
    """The request with a profile if its model has no formulas; ``every``: a profile for all engines and recomputations."""
    if job_request.request.config is None and job_request.request.fetched is None:
        return job_request
    from zeroplan.auto_profile import with_own_profile  # noqa: PLC0415  few models need it

    request, notes = with_own_profile(job_request.request, say=say, chosen=job_request.chosen, every=every)
    return job_request._replace(request=request, notes=notes)


def _resolved(given: dict[str, object], *, traces: bool, read_file: _ReadFile | None = None) -> Resolved:
    job_request = _job_request(given, read_file)
    job_request = _traced(job_request, every=False) if traces else job_request
    found = resolve(job_request.request, extra=job_request.extra, chosen=job_request.chosen)
    return found._replace(notes=(*job_request.how_sure(found.job), *found.notes))


def _job_request(given: dict[str, object], read_file: _ReadFile | None = None) -> JobRequest:
    catalog, from_run = given.pop("catalog"), given.pop("from_run")
    settings = given.pop("settings")
    settings = settings if isinstance(settings, (list, tuple)) else []
    job_file = given.pop("job_file")
    flags = {flag.field: _value(flag, given[flag.field]) for flag in FLAGS if given[flag.field] is not None}
    stated = Request(**flags)  # type: ignore[arg-type]  # Request checks every field
    run = None if from_run is None else _run(str(from_run), flags, job_file)
    if run is not None:
        request = run.overridden_by(stated)
    else:
        request = (_from_file(str(job_file), read_file) if job_file is not None else Request()).overridden_by(stated)
    extra = folder(None if catalog is None else str(catalog))
    request = _looked_up(request, extra) if "model" in flags else request
    for setting in settings:
        request = with_setting(request, str(setting))
    chosen = tuple(str(setting).partition("=")[0].removeprefix("deepspeed.") for setting in settings)
    return JobRequest(request, extra, chosen, run, stated)


def _run(path: str, flags: dict[str, object], job_file: object) -> "FromRun":
    """Return the saved run at a path; raises SpecError if another flag or a job file names a model as well."""
    other = next((name for name in (*WAYS_TO_NAME, "from_file", "deepspeed_config") if name in flags), None)
    if other is not None or job_file is not None:
        flag = f"--{other.removesuffix('_file').replace('_', '-')}" if other else f"job file {str(job_file)!r}"
        raise SpecError(f"--from-run {path!r} and {flag} both name what is trained; leave one of them out")
    from zeroplan.from_run import FromRun  # noqa: PLC0415  only this flag pays for it
    from zeroplan.saved_runs.files import read_saved  # noqa: PLC0415

    run = FromRun(read_saved(Path(path)), path)
    say(run.remainder)
    return run


def _looked_up(request: Request, extra: Path | None) -> Request:
    """The request with the config.json of a model on the Hub; raises UnknownNameError if ``--model`` is a file's path."""
    if is_there(Path(str(request.model))):
        try:
            find_model(str(request.model), extra=own_folder(extra, "models"))
        except UnknownNameError as unknown:
            raise UnknownNameError(f"{unknown}; there is a file or folder of this name, which goes to --config") from None
    return with_fetched(request, extra=extra)


#: ``8xH100``, as clouds and papers write it; it must not match ``0x10``.
_NUMBER_AND_NAME = re.compile(r"([1-9][0-9]*) ?[xX*] ?(\S.*)")


def _value(flag: Declared, text: object) -> object:
    if flag.is_switch:
        return text
    if flag.field == "keep_logits":
        return _kept(str(text))
    if flag.field in ("gpus", "gpu") and (both := _NUMBER_AND_NAME.fullmatch(str(text))):
        raise SpecError(f"--{flag.field} {text!r} contains two values; write --gpus {both[1]} --gpu {both[2]}")
    if flag.field == "seq_len":
        return parse_tokens(str(text), what="--seq-len", most=_bounds(flag)[1])
    if flag.is_number:
        least, most = _bounds(flag)
        return parse_count(str(text), what=flag.flag, examples="8 or 1024", least=least, most=most)
    return int(text) if flag.field == "stage" and str(text) in ("0", "1", "2", "3") else text  # type: ignore[call-overload]


def _kept(text: str) -> bool | str:
    if text not in KEEP_LOGITS:
        near = {"true": "; write yes", "false": "; write no"}.get(text.lower(), "")
        raise SpecError(f"--keep-logits {text!r} is none of {', '.join(KEEP_LOGITS)}{near}")
    return KEEP_LOGITS[text]


def _bounds(flag: Declared) -> tuple[int, int]:
    """The smallest and the largest value that a flag's field accepts."""
    return bounds_of(Request, flag.field) or (1, 10**18)


def _from_file(text: str, read_file: _ReadFile | None) -> Request:
    if not text:
        raise SpecError("job file '' is no file; give the path of one")
    if read_file is not None:
        return read_file(Path(text))
    from zeroplan.job_file import read_job_file  # noqa: PLC0415  only a job file pays for it

    return read_job_file(Path(text))
