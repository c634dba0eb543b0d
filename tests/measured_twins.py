"""Makes measurements from an estimate, so that a test chooses the difference between both."""

from zeroplan import estimate
from zeroplan.comparison import compare
from zeroplan.ledger import Kind, Phase
from zeroplan.measurement import CollectiveMeasured, Environment, Measurement, PhaseMeasured, StepMeasured
from zeroplan.resolve import job

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


def twin(*, factor: float = 1.0, **said: object) -> Measurement:
    """A record with the estimate's figures times ``factor``; of GPT-2 under DDP by default."""
    asked = job(**(said or {"model": "gpt2", "gpus": 4, "stage": 1, "engine": "ddp", "seq_len": 128}))
    nothing = StepMeasured(phases=tuple(phase(part.value, 1) for part in PHASES), held_bytes=1, held_kinds={})
    blank = measurement(asked, nothing)
    predicted = compare(estimate(asked), blank)
    peaks = {row.what: round(row.predicted * factor) for row in predicted.phases}
    kinds = {row.what: row.predicted for row in predicted.kinds if row.predicted}
    phases = tuple(phase(what, n_bytes, kinds) for what, n_bytes in peaks.items())
    step = StepMeasured(
        phases=phases, held_bytes=predicted.held.predicted, held_kinds={Kind.PARAMETERS: predicted.held.predicted}
    )
    sent = tuple(
        CollectiveMeasured(operation=row.what, dtype="float32", phase="backward", group=4, calls=1, n_bytes=row.predicted)
        for row in predicted.collectives
    )
    return measurement(asked, step, sent)


def phase(what: str, n_bytes: int, kinds: dict[str, int] | None = None) -> PhaseMeasured:
    return PhaseMeasured(phase=what, peak_bytes=n_bytes, kinds=kinds or {})


def measurement(asked: object, step: StepMeasured, sent: tuple[CollectiveMeasured, ...] = ()) -> Measurement:
    where = Environment(python="3.11.9", platform="Linux", packages={"torch": "2.13.0"}, device="a processor")
    remarks = ("made up for a test",)
    return Measurement(job=asked, backend="cpu", tensors="cpu", process_group="gloo", rank=0, environment=where,
                       steps=(step, step), collectives=sent, remarks=remarks)  # fmt: skip
