"""Predicts other runs of a script from its saved dry run. How far is the prediction from the run itself?"""

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
"""Smaller differences, as a share of the peak, are printed in bytes. A profile has no tensors of the loss, hence a remainder."""

_MATTERS = 0.01
"""Smaller differences of a phase, as a share of it, are not mentioned."""


class FromRun:
    """A saved run from which other runs of its script are predicted; ``path`` names it in errors.

    Raises :class:`~zeroplan.errors.SpecError` for a run without a profile.
    """

    def __init__(self, saved: SavedRun, path: str) -> None:
        self._run, self.path = saved.run, path
        self._general, self._settings, self._profile = _general(saved, f"saved run {path!r}")

    @property
    def request(self) -> Request:
        """The settings of the run itself; flags may override all of them."""
        settings = {one.name: getattr(self._settings, one.name) for one in fields(Settings) if one.name != "remarks"}
        return Request(model=model_of(self._profile), gpus=self._run.gpus, gpu=self._run.gpu, **settings)

    def overridden_by(self, flags: Request) -> Request:
        """The run's settings overridden by flags; another engine or stage resets stage, engine and optimizer implementation."""
        run = self.request
        if flags.engine is not None and flags.engine != run.engine:
            run = replace(run, stage=None, optimizer_impl=None, replicas=None)
        elif flags.stage is not None and run.engine is not None and engine_at(flags.stage, run.engine) != run.engine:
            run = replace(run, engine=None, optimizer_impl=None, replicas=None)
        return run.overridden_by(flags)

    def to_search(self, flags: Request, searched: Collection[str]) -> Request:
        """The run's settings overridden by flags, without the settings that the planner searches."""
        from zeroplan.planner.asking import SEARCHED  # noqa: PLC0415  only plans need it

        return replace(self.request, **dict.fromkeys((*SEARCHED, *searched))).overridden_by(flags)

    def held_against(self, run: DryRun, flags: Request) -> Comparison:
        """Compare the prediction for these flags with another run of the script that used them."""
        job = resolve(self.overridden_by(flags)).job
        measured = Measurement(
            job=job, backend="simulate", tensors="fake", kernels=job.cluster.kernels, process_group="fake", rank=run.rank,
            environment=run.environment, initialisation=run.initialisation, steps=run.steps, collectives=run.collectives,
            allocator=run.allocator,
        )  # fmt: skip
        return compare_with_estimate(measured, has_scratch=True)

    @cached_property
    def own_comparison(self) -> Comparison:
        """The prediction for the run's own settings compared with the run."""
        return self.held_against(self._run, Request())

    def how_sure(self, job: JobSpec) -> tuple[str, ...]:
        """Remarks on the accuracy of a prediction for this job, first its error at the run's own settings.

        Raises SpecError for sequence lengths that the script's model refuses.
        """
        too_long = self._general.too_long
        if too_long is not None and job.batch.seq_len >= too_long:
            raise SpecError(
                f"the model of {self.path!r} refuses sequences of {too_long:,} tokens, and --seq-len is "
                f"{job.batch.seq_len:,}; lengths up to {self._general.longest or 1:,} were traced"
            )
        return (self.remainder, *self._phases(), *map(_visible, self._settings.remarks), *self._beyond(job))

    @property
    def remainder(self) -> str:
        """The error of the prediction for the run's own settings, in a sentence."""
        run, settings, peak = self._run, self._settings, self.own_comparison.peak
        gpus = f"{run.gpus:,} GPU{'s' if run.gpus > 1 else ''}"
        of = f"from a run on {gpus} with {settings.micro_batch:,} x {settings.seq_len:,} tokens; for it this prediction"
        if not peak.difference:
            return f"{of} gives the run's peak to the byte"
        if abs(peak.error) <= _EXACT:
            return f"{of} is {abs(peak.difference):,} bytes from the run's peak"
        over = "above" if peak.difference > 0 else "below"
        return (
            f"{of} is {abs(peak.error):.2%} {over} the run's peak of {format_size(peak.measured)}; expect the same error here"
        )

    def _phases(self) -> Iterator[str]:
        """Remarks on phases of the run that the prediction underestimates; each may be the peak of another job."""
        compared = self.own_comparison
        for phase in compared.phases:
            if -phase.difference > max(_MATTERS * phase.measured, -compared.peak.difference):
                low = format_size(-phase.difference)
                yield f"the run's {phase.what} is {low} above this prediction; if a job peaks there, its estimate is too low"

    def _beyond(self, job: JobSpec) -> Iterator[str]:
        """Remarks on settings of the job that the script neither ran nor traced."""
        recipe, batch, settings, longest = job.recipe, job.batch, self._settings, self._general.longest
        if recipe.engine != settings.engine:
            yield f"the script ran with engine {settings.engine!r}; no run confirms this prediction for {recipe.engine!r}"
        if recipe.recompute != settings.recompute:
            yield f"recomputation {recipe.recompute!r} is applied to the blocks; the script ran with {settings.recompute!r}"
        if longest is not None and batch.seq_len > longest and self._profile.seq_len is None:
            yield f"sequences up to {longest:,} tokens were traced; longer ones are extrapolated"


def _general(saved: SavedRun, where: str) -> tuple[ScriptProfile, Settings, Profile]:
    general = saved.general
    if general is None:
        raise SpecError(f"{where} has no profile of its model; run the script again with --save FILE --profile own")
    if general.profile is None or general.settings is None:
        raise SpecError(f"{where} cannot predict other runs: {_visible(general.unknown)}")
    return general, general.settings, general.profile


def _visible(text: str) -> str:
    """Untrusted text with unprintable characters escaped, safe for a terminal."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)
