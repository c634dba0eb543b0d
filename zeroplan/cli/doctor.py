"""``zeroplan doctor``: which packages are installed, and which commands work with them?"""

from typing import Annotated

import typer

from zeroplan.cli import json_text


def doctor_command(*, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List what is installed, which commands and backends work here, and what to install for the others."""
    from zeroplan.installation import abilities  # noqa: PLC0415  keeps start-up fast
    from zeroplan.report.doctor import doctor_payload, doctor_text, versions  # noqa: PLC0415

    found, able = versions(), abilities(_no_gpu, _no_dry_run)
    typer.echo(json_text(doctor_payload(found, able)) if as_json else doctor_text(found, able))


def _no_gpu() -> str:
    """The reason why no GPU can be used; empty if one can."""
    from zeroplan.verify.backends.gpu_ready import why_not  # noqa: PLC0415  torch takes seconds to import

    return why_not()


def _no_dry_run() -> str:
    """The reason why dry runs do not work here; empty if they do."""
    from zeroplan.verify.fake_cuda.private_names import why_not  # noqa: PLC0415  as above

    return why_not()
