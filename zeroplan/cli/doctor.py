"""``zeroplan doctor``: what is installed here, and what can be done with it."""

from typing import Annotated

import typer

from zeroplan.cli import json_text


def doctor_command(*, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List what is installed, which commands and backends work here, and what to install for the others."""
    from zeroplan.installation import abilities  # noqa: PLC0415  no other answer waits for it
    from zeroplan.report.doctor import doctor_payload, doctor_text, versions  # noqa: PLC0415

    found, able = versions(), abilities(_no_gpu, _no_dry_run)
    typer.echo(json_text(doctor_payload(found, able)) if as_json else doctor_text(found, able))


def _no_gpu() -> str:
    """Why no GPU can be used, in a line; empty where one can."""
    from zeroplan.verify.backends.gpu_ready import why_not  # noqa: PLC0415  torch takes seconds to import

    return why_not()


def _no_dry_run() -> str:
    """Why no script can be run on a fake GPU, in a line; empty where one can."""
    from zeroplan.verify.fake_cuda.private_names import why_not  # noqa: PLC0415  as above

    return why_not()
