"""The table of programs that a dry run goes through, from what the survey keeps."""

from __future__ import annotations

from tests.docs.generated.markdown import table
from tests.dryrun.survey import kept, programs


def table_of_programs() -> str:
    """What each program took, its time and the memory of the machine that it ran on; in the order of the survey."""
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
