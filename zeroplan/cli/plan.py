"""``zeroplan plan``: which layout should run on these GPUs, how fast is it, and which file runs it?"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.flags import AsJson, AsMarkdown, Force, flag, refuse_two_renderings, switch, with_fields
from zeroplan.cli.job_flags import JobRequest, with_request_flags
from zeroplan.cli.searching import shown_if_slow
from zeroplan.errors import SpecError
from zeroplan.resolve import Request
from zeroplan.units import parse_count, parse_fraction
from zeroplan.whole import refuse_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroplan.calibration import Learnt
    from zeroplan.export.files import Target
    from zeroplan.planner.asking import Question
    from zeroplan.planner.objectives import Objective
    from zeroplan.planner.result import Best, Plan
    from zeroplan.report.plan import Beside
    from zeroplan.spec.hardware import SharesSpec
    from zeroplan.spec.job import JobSpec
    from zeroplan.spec.model import ModelSpec

_flag, _switch = partial(flag, panel="Plan"), partial(switch, panel="Plan")
_HELD = (
    "accelerate returns logits in fp32, and a training loop usually keeps them during the backward, so they are counted; if "
    "your loop drops them, set --keep-logits no"
)


Mfu = Annotated[str | None, _flag("", "SHARE", "The share of its dense peak that a GPU reaches, instead of the fitted shares.")]
Calibrate = Annotated[
    list[str] | None,
    _flag(
        "",
        "FILE",
        "A record of a step on this GPU (`zeroplan verify --backend cuda`), repeatable. The part of its "
        "deviation that this job is expected to share corrects the fitted rates.",
    ),
]
Measured = Annotated[
    str | None,
    _flag(
        "",
        "RATE|FILE",
        "The speed of a run on these GPUs, such as tokens-per-second=10682 (per GPU), or its log (torchtitan, Megatron-LM, "
        "Trainer). The part of its deviation that this job is expected to share corrects the fitted rates.",
    ),
]


class Asked(NamedTuple):
    """What to look for, as typed."""

    global_batch: Annotated[
        str | None,
        _flag(
            "",
            "N",
            "Sequences of all GPUs per step; the search chooses micro-batch and accumulation. (default: about 4 million tokens, "
            "but 1 to 64 sequences per GPU)",
        ),
    ] = None
    objective: Annotated[
        str | None,
        _flag(
            "",
            "NAME",
            "throughput, headroom (least memory) or cost (most tokens per GPU, on --gpus or fewer). (default: throughput)",
        ),
    ] = None
    min_gpus: Annotated[bool, _switch("--min-gpus", "Find the fewest GPUs that fit.")] = False
    max_seq: Annotated[bool, _switch("--max-seq", "Find the longest sequence that fits.")] = False
    max_batch: Annotated[bool, _switch("--max-batch", "Find the largest micro-batch that fits.")] = False
    max_params: Annotated[bool, _switch("--max-params", "Find the largest model that fits, with a shape as for --params.")] = (
        False
    )

    def question(self, mfu: str | None) -> "Question":
        """Return the planner's question."""
        from zeroplan.planner.asking import Question  # noqa: PLC0415  see plan_command

        batch = None if self.global_batch is None else parse_count(self.global_batch, what="--global-batch", examples="1024")
        share = None if mfu is None else share_of(mfu, "--mfu")
        objective = _objective(self.objective)
        return Question(objective, batch, share, self.min_gpus, self.max_seq, self.max_batch, max_params=self.max_params)


class Flags(NamedTuple):
    """The other flags, as typed."""

    search_optimizer: Annotated[
        bool,
        _switch(
            "--search-optimizer",
            "Also try Adam with 8-bit states, and with weights and states in bf16. Both change the training.",
        ),
    ] = False
    mfu: Mfu = None
    margin: Annotated[
        str | None, _flag("", "SHARE", "Share of the GPU's memory to keep free beyond the allocator's cache. (default: 5%)")
    ] = None
    calibrate: Calibrate = None
    measured: Measured = None
    measured_job: Annotated[str | None, _flag("", "FILE", "The job file of the run that --measured describes.")] = None
    tokens: Annotated[
        str | None, _flag("", "COUNT", "Tokens to train on, such as 15T: also print how many days that takes.")
    ] = None
    price_per_gpu_hour: Annotated[
        str | None, _flag("", "AMOUNT", "Price of a GPU per hour: also print what the tokens cost.")
    ] = None
    emit: Annotated[
        str | None,
        flag("", "TARGET", "Write the files that run the layout: deepspeed, accelerate, fsdp2, torchtitan or megatron."),
    ] = None
    out: Annotated[str | None, flag("", "FOLDER", "The folder for --emit. (default: the current one)")] = None
    force: Force = False
    verbose: Annotated[
        bool, switch("--verbose", "Also print memory by kind, time by part and rejected layouts.", short="-v")
    ] = False
    as_json: AsJson = False
    as_markdown: AsMarkdown = False


def _plan(*, job_request: JobRequest, asked: Asked, flags: Flags) -> int:
    """Find the best layout that fits, with its memory, step time, reasons and the configuration that runs it."""
    from zeroplan.report.plan import Beside  # noqa: PLC0415  no other command pays for the planner and NumPy
    from zeroplan.report.step import learnt_words  # noqa: PLC0415

    refuse_two_renderings(as_json=flags.as_json, as_markdown=flags.as_markdown)
    target = _target(flags.emit, flags.out, force=flags.force)
    question = asked.question(flags.mfu)
    learning = _learning(flags.measured, flags.measured_job, job_request, flags.calibrate)
    calibrating = shares_measured(flags.calibrate, job_request) if learning is None else _shares_by(learning)
    question = question._replace(search_optimizer=flags.search_optimizer, calibrating=calibrating)
    if flags.margin is not None:
        question = question._replace(margin=share_of(flags.margin, "--margin"))
    budget = None if flags.tokens is None else parse_count(flags.tokens, what="--tokens", examples="15T, 300e9 or 2b")
    price = None if flags.price_per_gpu_hour is None else _price(flags.price_per_gpu_hour)
    with shown_if_slow():
        answer, request, notes = _planned(job_request, question, target)
    beside = Beside("", budget, price)
    if answer.best is not None:
        learnt = () if learning is None else (learnt_words(learning(answer.best.layout.job.model)),)
        beside = _with_command(beside, answer.best, request, job_request)
        if target is not None:
            beside = _with_files(beside, answer.best, target, Path(flags.out or "."), force=flags.force)
        beside = beside._replace(notes=(*beside.notes, *notes, *learnt))
    _show(answer, beside, flags)
    return NO if answer.best is None else 0


plan_command = with_request_flags(with_fields(_plan, "asked", "flags"))


def _planned(job_request: JobRequest, question: "Question", target: "Target | None") -> "tuple[Plan, Request, tuple[str, ...]]":
    """Return the plan, the completed request, and notes on the file to write."""
    from zeroplan.export.accelerate import as_accelerate_has_it  # noqa: PLC0415  see plan_command
    from zeroplan.export.files import inexpressible_in  # noqa: PLC0415
    from zeroplan.planner.asking import ask, with_setup_defaults  # noqa: PLC0415
    from zeroplan.transformer.params import parameter_count  # noqa: PLC0415

    looked_for = {"seq_len": question.max_seq, "gpus": question.min_gpus}
    found = with_setup_defaults(job_request.to_search([name for name, wanted in looked_for.items() if wanted]))
    to_plan = found.request
    request = as_accelerate_has_it(to_plan) if target == "accelerate" else to_plan
    answer = ask(request, found.question(question), extra=job_request.extra, inexpressible=inexpressible_in(target))
    answer = replace(answer, notes=(*found.notes, *answer.notes))
    notes = (_HELD,) if request.keep_logits != to_plan.keep_logits else ()
    if answer.best is not None:
        answer = replace(answer, notes=(*job_request.how_sure(answer.best.layout.job), *answer.notes))
    if question.max_params and answer.best is not None:
        request = replace(request, params=parameter_count(answer.base.model))
    return answer, request, notes


def _with_command(beside: "Beside", best: "Best", request: Request, job_request: JobRequest) -> "Beside":
    from zeroplan.export.command import estimate_command  # noqa: PLC0415  see plan_command

    path = None if job_request.run is None else job_request.run.path
    return beside._replace(command=estimate_command(best.layout.job, request, from_run=path))


def _with_files(beside: "Beside", best: "Best", target: "Target", folder: Path, *, force: bool) -> "Beside":
    """Write the files that run a layout, and add their paths to the output."""
    from zeroplan.export.files import export, write  # noqa: PLC0415  see plan_command

    made = export(best.layout.job, target)
    paths = write(made, folder, force=force)
    return beside._replace(written=tuple(map(str, paths)), launch=made.launch, notes=made.notes)


def shares_measured(records: list[str] | None, job_request: JobRequest) -> "Callable[[ModelSpec], SharesSpec | None] | None":
    """Return a function to the shares that recorded steps let one expect of a model's layouts; None without records."""
    if not records:
        return None
    from zeroplan.calibration import calibrated  # noqa: PLC0415  only this flag pays for it
    from zeroplan.records import read_record  # noqa: PLC0415
    from zeroplan.resolve import cluster_of  # noqa: PLC0415

    read, here = [read_record(Path(one)) for one in records], cluster_of(job_request.request, job_request.extra)

    return cache(lambda model: calibrated(read, here, model).shares)


def measured_rate(text: str, job: "JobSpec") -> float:
    """Return the tokens per second and GPU of ``--measured``, a rate or a log of this job; raises SpecError for other text."""
    if Path(text).is_file():
        from zeroplan.catalog.run_log import Step, tokens_per_s  # noqa: PLC0415  only a log pays for it
        from zeroplan.catalog.text import read_text  # noqa: PLC0415

        batch, mesh = job.batch, job.mesh
        sequences = batch.micro_batch_size * batch.grad_accum_steps * mesh.world_size // mesh.model_ranks
        step = Step(sequences, batch.seq_len, mesh.world_size)
        return tokens_per_s(read_text(Path(text), what="--measured"), step, where=f"--measured {text}")
    name, _, number = text.partition("=")
    if name != _RATE or not number.replace(".", "", 1).isdigit() or not float(number):
        raise SpecError(
            f"--measured {text!r} is neither a rate nor a file; write {_RATE}=10682 (tokens per second and GPU), or name a log"
        )
    return float(number)


_RATE = "tokens-per-second"


def _learning(
    measured: str | None, path: str | None, job_request: JobRequest, calibrate: list[str] | None
) -> "Callable[[ModelSpec], Learnt] | None":
    """Return a function to what the run of --measured and --measured-job teaches of a model's layouts; None without it."""
    if (measured is None) != (path is None):
        raise SpecError(
            "--measured needs --measured-job, the job file of that run, and --measured-job needs --measured; give both"
        )
    if measured is None or path is None:
        return None
    if calibrate:
        raise SpecError("--measured and --calibrate are two rates at which a GPU computes; leave one of them out")
    from zeroplan.calibration import learnt_from  # noqa: PLC0415  only this flag pays for it
    from zeroplan.job_file import read_job_file  # noqa: PLC0415
    from zeroplan.resolve import cluster_of, resolve  # noqa: PLC0415

    job, here = (
        resolve(read_job_file(Path(path)), extra=job_request.extra).job,
        cluster_of(job_request.request, job_request.extra),
    )
    if job.cluster.gpu is None or here.gpu is None or job.cluster.gpu.name != here.gpu.name:
        raise SpecError(f"--measured-job {path!r} describes another GPU than --gpu; use the same")
    rate = measured_rate(measured, job)
    return cache(lambda model: learnt_from(job, rate, model))


def _shares_by(learning: "Callable[[ModelSpec], Learnt]") -> "Callable[[ModelSpec], SharesSpec | None]":
    return lambda model: learning(model).cluster.shares


def _show(plan: "Plan", said: "Beside", flags: Flags) -> None:
    from zeroplan.report.plan import plan_markdown, plan_payload, plan_text  # noqa: PLC0415  see plan_command

    if flags.as_json:
        typer.echo(json_text(plan_payload(plan, said)))
    elif flags.as_markdown:
        typer.echo(plan_markdown(plan, said))
    else:
        from zeroplan.cli.terminal import show  # noqa: PLC0415

        show(plan_text(plan, said, verbose=flags.verbose))


def _target(emit: str | None, out: str | None, *, force: bool) -> "Target | None":
    from zeroplan.export.files import TARGETS  # noqa: PLC0415  see plan_command

    if emit is None:
        if out is not None or force:
            raise SpecError(f"{'--out' if out is not None else '--force'} says how to write, but --emit is not given; add it")
        return None
    if emit not in TARGETS:
        raise SpecError(f"--emit {emit!r} is none of {', '.join(TARGETS)}")
    refuse_folder(Path(out or "."), "--out")
    return emit


def _objective(text: str | None) -> "Objective":
    from zeroplan.planner.objectives import OBJECTIVES  # noqa: PLC0415  see plan_command

    for objective in OBJECTIVES:
        if text in (None, objective):
            return objective
    raise SpecError(f"--objective {text!r} is none of {', '.join(OBJECTIVES)}")


def share_of(text: str, name: str) -> float:
    """Return the typed share as a fraction; raises SpecError with the flag's name."""
    share = parse_fraction(text)
    if share is None:
        raise SpecError(f"{name} {text!r} is not a share; write 0.45 or 45%")
    return share


def _price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SpecError(f"--price-per-gpu-hour {text!r} is not an amount; write 2.50") from None
    if not 0 < value < 1e9:
        raise SpecError(f"--price-per-gpu-hour {text!r} is out of range; write an amount above 0")
    return value
