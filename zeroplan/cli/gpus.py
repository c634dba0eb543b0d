"""``zeroplan gpus``: lists the GPUs in the catalogue, and shows every figure of one with its source."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zeroplan.catalog.gpu import gpu, gpus
from zeroplan.cli import json_text
from zeroplan.cli.flags import Catalog, folder
from zeroplan.errors import SpecError
from zeroplan.report.catalog import gpu_table, gpu_text
from zeroplan.resolve import own_folder
from zeroplan.spec.hardware import GpuSpec
from zeroplan.units import MB, parse_size

gpus_app = typer.Typer(help="List the GPUs in the catalogue.", invoke_without_command=True, no_args_is_help=False)


@gpus_app.callback()
def list_gpus(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure with its source, as JSON.")] = False,
    vendor: Annotated[str | None, typer.Option(metavar="nvidia|amd", help="Only this vendor's.")] = None,
    min_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="At least this much memory, such as 80GB or 75GiB.")
    ] = None,
    matching: Annotated[str | None, typer.Option(metavar="TEXT", help="Names that contain this text.")] = None,
    catalog: Catalog = None,
) -> None:
    """List accelerators: memory as torch reports it, peak rates, bandwidth, links."""
    if context.invoked_subcommand is not None:
        return
    chosen = _chosen(own_folder(folder(catalog), "gpus"), vendor, min_memory, matching)
    typer.echo(json_text([asdict(one) for one in chosen]) if as_json else gpu_table(chosen))


@gpus_app.command("show")
def show_gpu(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A GPU's name or alias.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    catalog: Catalog = None,
) -> None:
    """Show one GPU: every figure with its source and derivation."""
    found = gpu(name, extra=own_folder(folder(catalog), "gpus"))
    typer.echo(json_text(asdict(found)) if as_json else gpu_text(found))


def _chosen(own: Path | None, vendor: str | None, min_memory: str | None, matching: str | None) -> list[GpuSpec]:
    if vendor is not None and vendor not in ("nvidia", "amd"):
        raise SpecError(f"--vendor {vendor!r} is neither nvidia nor amd")
    least = 0 if min_memory is None else parse_size(min_memory, what="--min-memory")
    if min_memory is not None and least < MB:
        raise SpecError(f"--min-memory {min_memory!r} is {least:,} bytes, less than any GPU has; write {min_memory}GB, say")
    return [
        one
        for one in gpus(extra=own)
        if (vendor is None or one.vendor == vendor)
        and one.memory_bytes.value >= least
        and (matching is None or matching.lower() in f"{one.name} {one.full_name}".lower())
    ]
