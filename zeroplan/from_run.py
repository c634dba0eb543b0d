"""What does a saved dry run of a script say of other runs of it, and how far off is it at the run's own settings?"""

from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from functools import cached_property

from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.errors import SpecError
from zeroplan.measurement import Measurement
from zeroplan.resolve import Request, resolve
from zeroplan.script_profile import ScriptProfile, Settings
from zeroplan.script_run import DryRun
from zeroplan.script_trace import SavedRun
from zeroplan.spec.job import JobSpec, engine_at
from zeroplan.spec.profile import Profile, model_of
from zeroplan.units import format_size

_EXACT = 1e-4
"""A difference below this share of the peak is said in bytes: the loss and its counts are no part of a profile."""

_MATTERS = 0.01
"""Nor is a phase that is not the peak worth a sentence where it is off by less."""


class FromRun:
    """A run, as what is asked about other runs of its script starts from; ``path`` is what it is called in an error.

    Raises :class:`~zeroplan.errors.SpecError` for one that has no profile.
    """

    def __init__(self, saved: SavedRun, path: str) -> None:
        self._run, self.path = saved.run, path
        self._general, self._settings, self._profile = _general(saved, f"saved run {path!r}")

    @property
    def request(self) -> Request:
        """The run's own settings, every one of which flags may override."""
        settings = {one.name: getattr(self._settings, one.name) for one in fields(Settings) if one.name != "remarks"}
        return Request(model=model_of(self._profile), gpus=self._run.gpus, gpu=self._run.gpu, **settings)

    def overridden_by(self, said: Request) -> Request:
        """The run's settings with what is said beside them: another engine or stage takes its own stage, engine and step."""
        run = self.request
        if said.engine is not None and said.engine != run.engine:
            run = replace(run, stage=None, optimizer_impl=None, replicas=None)
        elif said.stage is not None and run.engine is not None and engine_at(said.stage, run.engine) != run.engine:
            run = replace(run, engine=None, optimizer_impl=None, replicas=None)
        return run.overridden_by(said)

    def to_search(self, said: Request, looked_for: Collection[str]) -> Request:
        """The run's settings without those that a plan decides or looks for, with what is said beside them."""
        from zeroplan.planner.asking import SEARCHED  # noqa: PLC0415  only a plan pays for it

        return replace(self.request, **dict.fromkeys((*SEARCHED, *looked_for))).overridden_by(said)

    def held_against(self, run: DryRun, said: Request) -> Comparison:
        """The answer for these settings, which are those of another run of the script, held against that run."""
        job = resolve(self.overridden_by(said)).job
        measured = Measurement(
            job=job, backend="simulate", tensors="fake", kernels="cuda", process_group="fake", rank=run.rank,
            environment=run.environment, initialisation=run.initialisation, steps=run.steps, collectives=run.collectives,
            allocator=run.allocator,
        )  # fmt: skip
        return compare_with_estimate(measured, has_scratch=True)

    @cached_property
    def own_comparison(self) -> Comparison:
        """The answer for the run's own settings, held against the run."""
        return self.held_against(self._run, Request())

    def how_sure(self, job: JobSpec) -> tuple[str, ...]:
        """What a reader must know of an answer for this job, a sentence each: the remainder at the run's own settings first.

        Raises SpecError for sequences that the script's model does not take.
        """
        too_long = self._general.too_long
        if too_long is not None and job.batch.seq_len >= too_long:
            raise SpecError(
                f"the model of {self.path!r} does not take sequences of {too_long:,} tokens, and --seq-len is "
                f"{job.batch.seq_len:,}; up to {self._general.longest or 1:,} were looked at"
            )
        return (self.remainder, *self._phases(), *map(_visible, self._settings.remarks), *self._beyond(job))

    @property
    def remainder(self) -> str:
        """How far the answer for the run's own settings is from the run, in a sentence."""
        run, settings, peak = self._run, self._settings, self.own_comparison.peak
        gpus = f"{run.gpus:,} GPU{'s' if run.gpus > 1 else ''}"
        of = f"from a run on {gpus} with {settings.micro_batch:,} x {settings.seq_len:,} tokens; there this way of answering"
        if not peak.difference:
            return f"{of} gives the run's peak to the byte"
        if abs(peak.error) <= _EXACT:
            return f"{of} is {abs(peak.difference):,} bytes from the run's peak"
        over = "above" if peak.difference > 0 else "below"
        return f"{of} is {abs(peak.error):.2%} {over} the run's peak of {format_size(peak.measured)}: the answer is as unsure"

    def _phases(self) -> Iterator[str]:
        """Phases of the run that are higher than this way of answering has them: any may be the peak of another job."""
        compared = self.own_comparison
        for phase in compared.phases:
            if -phase.difference > max(_MATTERS * phase.measured, -compared.peak.difference):
                low = format_size(-phase.difference)
                yield f"the run's {phase.what} is {low} above this way of answering: where it is the peak, the answer is too low"

    def _beyond(self, job: JobSpec) -> Iterator[str]:
        """In what the job goes beyond what was run or looked at."""
        recipe, batch, settings, longest = job.recipe, job.batch, self._settings, self._general.longest
        if recipe.engine != settings.engine:
            yield f"the script ran with engine {settings.engine!r}: no run is behind this answer of {recipe.engine!r}"
        if recipe.recompute != settings.recompute:
            yield f"recomputation {recipe.recompute!r} is put around the blocks; the script ran with {settings.recompute!r}"
        if longest is not None and batch.seq_len > longest and self._profile.seq_len is None:
            yield f"sequences were looked at up to {longest:,} tokens, and longer ones are taken to go on alike"


def _general(saved: SavedRun, where: str) -> tuple[ScriptProfile, Settings, Profile]:
    general = saved.general
    if general is None:
        raise SpecError(f"{where} has no profile of its model; run the script again with --save FILE --profile own")
    if general.profile is None or general.settings is None:
        raise SpecError(f"{where} says nothing of other runs: {_visible(general.unknown)}")
    return general, general.settings, general.profile


def _visible(text: str) -> str:
    """What a stranger's file says, as a line of a terminal may have it."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)
