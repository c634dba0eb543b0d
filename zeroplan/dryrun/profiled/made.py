"""Builds the profile of a script's model after the script has ended, or says why it cannot."""

import gc
from dataclasses import replace
from pathlib import Path

from zeroplan.dryrun.profiled.bare import bare
from zeroplan.dryrun.profiled.observer import Observer
from zeroplan.dryrun.profiled.settings import Loops, settings_of
from zeroplan.dryrun.profiled.subject import Ran, ScriptSubject, own_shape, varied
from zeroplan.dryrun.profiled.tape import check
from zeroplan.dryrun.task import DryRunTask
from zeroplan.errors import MeasurementError, ZeroplanError
from zeroplan.script_profile import ScriptProfile, Settings
from zeroplan.spec.profile import Profile
from zeroplan.spec.recipe import Engine, Precision, Recompute
from zeroplan.verify.profiling.derived import OtherProgramError
from zeroplan.verify.profiling.profile import Wanted, profile
from zeroplan.verify.profiling.subject import Subject

_LONGEST = 300
"""Longest part of an error message to show. [characters]"""


def script_profile(seen: Observer, task: DryRunTask, *, init_peak_bytes: int) -> ScriptProfile:
    """Settings and profile of the script's model. Takes the model out of its engine, so call it only at the end of a run."""
    gc.collect()
    gc.freeze()  # later collections then skip the script's objects
    try:
        return _made(seen, task, init_peak_bytes)
    except ZeroplanError as error:
        return ScriptProfile(unknown=_sentence(str(error)))
    except Exception as error:  # noqa: BLE001  a user's module may raise anything when rerun
        return ScriptProfile(unknown=_sentence(f"its model cannot be rerun: {type(error).__name__}: {error}"))


def _sentence(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


def _made(seen: Observer, task: DryRunTask, init_peak_bytes: int) -> ScriptProfile:
    ran, root = _ran(seen), seen.root
    if root is None:
        raise MeasurementError("its last step did not run")
    own, inside = own_shape(ran.call), seen.inside if seen.blocks else ran.call.autocast
    loops = Loops(
        gpus=task.gpus, micro_batch=own.sequences, seq_len=max(1, own.length), grad_accum=max(1, seen.backwards),
        recompute=ran.recompute, keep_logits=bool(ran.tape.held), autocast=inside, syncs=seen.syncs,
        loss_outside=bool(ran.tape.steps), init_peak_bytes=init_peak_bytes,
    )  # fmt: skip
    settings = settings_of(root, seen.optimizer, loops)
    subject = ScriptSubject(bare(root), ran)
    wanted = _wanted(settings, otherwise=task.profiled == "all", recompute_otherwise=subject.can_recompute_otherwise)
    found = _profile(subject.subject(f"a dry run of {Path(task.target).name}"), wanted, settings.seq_len)
    if found.seq_len is not None:
        found = replace(found, seq_len=max(1, own.length))
    return ScriptProfile(
        settings=settings,
        profile=found,
        varied=varied(ran.call),
        longest=subject.longest or None,
        too_long=subject.too_long if found.seq_len is None else None,
    )


def _profile(subject: Subject, wanted: Wanted, length: int) -> Profile:
    """The profile for every length. If short ones run other operators, for the script's length and longer, or for it alone."""
    try:
        return profile(subject, wanted, say=lambda _: None)
    except OtherProgramError:
        return profile(subject, wanted._replace(shortest=length), say=lambda _: None)


def _ran(seen: Observer) -> Ran:
    """The call and loss to rerun. Raises MeasurementError unless the loop has one call, loss and backward."""
    if seen.models != 1:
        raise MeasurementError(f"it trains {seen.models} models, and a job has only one")
    if seen.call is None:
        raise MeasurementError("its model was called once only; take two --steps or more")
    if seen.most_calls > 1:
        raise MeasurementError(f"its model is called {seen.most_calls} times before a backward, and a job calls it once")
    if seen.tape is None:
        raise MeasurementError("the script has its own torch function mode around the model, so its loss was not recorded")
    check(seen.tape)
    recompute: Recompute = "full" if seen.recomputes else "none"
    return Ran(seen.call, seen.tape, recompute)


def _wanted(settings: Settings, *, otherwise: bool, recompute_otherwise: bool) -> Wanted:
    """The settings to profile: the script's own; with ``otherwise`` also other engines and recomputation."""
    precision: Precision = "bf16-mixed" if settings.precision == "fp16-mixed" else settings.precision
    engines: tuple[Engine, ...] = ("fsdp2", "ddp") if otherwise else ("ddp" if settings.engine == "ddp" else "fsdp2",)
    every: tuple[Recompute, ...] = ("none", "selective", "full")
    return Wanted(engines, (precision,), every if otherwise and recompute_otherwise else (settings.recompute,))
