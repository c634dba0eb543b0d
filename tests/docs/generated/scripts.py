"""Tables of dry runs, from stored rows: the surveyed programs, and predictions from one run compared with another run."""

from __future__ import annotations

from tests.docs.generated.markdown import table
from tests.dryrun import asked
from tests.dryrun.survey import kept, programs


def table_of_programs() -> str:
    """Return each program's peak, its time and the host memory of its dry run, in the order of the survey."""
    found = {row["name"]: row for row in kept()}
    head = ("program", "packages", "GPUs:", "peak [MiB]:", "reserved [MiB]:", "seconds:", "host [GiB]:")
    return table(head, [_row(found[program.name]) for program in programs() if program.name in found])


def _row(row: dict[str, object]) -> tuple[str, ...]:
    packages = ", ".join(f"{name} {version}" for name, version in row["packages"].items() if name != "torch")  # type: ignore[attr-defined]
    if "said" in row:
        return (str(row["name"]), packages, f"{row['gpus']}", f"does not run: {row['said']}", "", "", "")
    sizes = (f"{int(row[key]) / 2**20:,.1f}" for key in ("peak_bytes", "reserved_bytes"))  # type: ignore[call-overload]
    return (
        str(row["name"]), packages, f"{row['gpus']}", *sizes, f"{row['seconds']:.0f}", f"{int(row['host_bytes']) / 2**30:.1f}",  # type: ignore[call-overload]
    )  # fmt: skip


def table_of_answers() -> str:
    """Return the peaks that saved runs predict for other runs, and the peaks of dry runs of those."""
    head = ("script", "run", "predicted run", "predicted [MiB]:", "dry run [MiB]:", "difference:")
    return table(head, [_answer(row) for row in asked.kept()])


def _answer(row: asked.Asked) -> tuple[str, ...]:
    settings = (
        f"{gpus} GPUs, {batch} x {length:,}" for gpus, (batch, length) in zip(row.gpus, (row.run, row.other), strict=True)
    )
    sizes = (f"{n_bytes / 2**20:,.2f}" for n_bytes in (row.asked_bytes, row.measured_bytes))
    more = row.asked_bytes - row.measured_bytes
    return (row.name, *settings, *sizes, f"{more:+,} bytes, {abs(more) / row.measured_bytes:.2%}")
