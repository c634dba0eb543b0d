"""``zeroplan time``: how long does a step of this job take, part by part, whether it fits or not?"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zeroplan.cli import json_text
from zeroplan.cli.flags import AsJson, switch
from zeroplan.cli.job_flags import with_job_flags
from zeroplan.cli.plan import Calibrate, Measured, Mfu, measured_rate, share_of
from zeroplan.errors import SpecError
from zeroplan.estimator import judged
from zeroplan.resolve import Resolved

Explain = Annotated[bool, switch("--explain", "Print how each part is computed, and its source.")]


@with_job_flags
def time_command(
    *, resolved: Resolved, mfu: Mfu = None, measured: Measured = None, calibrate: Calibrate = None, explain: Explain = False,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Estimate the time of one step, part by part: computing, sending, waiting, and what overlaps."""
    from zeroplan.calibration import calibrated, learnt_from  # noqa: PLC0415  only this command pays for the clock
    from zeroplan.job_time import time_of  # noqa: PLC0415
    from zeroplan.records import read_record  # noqa: PLC0415
    from zeroplan.report.step import step_payload, step_text  # noqa: PLC0415

    job, share = resolved.job, None if mfu is None else share_of(mfu, "--mfu")
    if sum(one is not None for one in (mfu, measured, calibrate or None)) > 1:
        raise SpecError("--mfu, --measured and --calibrate are three rates at which a GPU computes; use one of them")
    learnt = None if measured is None else learnt_from(job, measured_rate(measured, job))
    if learnt is not None:
        job = replace(job, cluster=learnt.cluster)
    elif calibrate:
        job = replace(job, cluster=calibrated([read_record(Path(one)) for one in calibrate], job.cluster, job))
    answer, time = judged(job), time_of(job, mfu=share)
    if as_json:
        typer.echo(json_text(step_payload(answer, time, learnt, resolved.notes)))
        return 0
    from zeroplan.cli.terminal import show  # noqa: PLC0415  only the chosen rendering is loaded

    show(step_text(answer, time, learnt, resolved.notes, explain=explain))
    return 0
