"""``zeroplan models``: lists the models in the catalogue, and shows the shape, source and parameters of one."""

from dataclasses import asdict
from textwrap import fill
from typing import Annotated

import typer

from zeroplan.catalog.model import ModelEntry, model_entry, models
from zeroplan.catalog.traced import traced_names
from zeroplan.cli import json_text
from zeroplan.cli.flags import Catalog, folder
from zeroplan.errors import SpecError, unknown_name
from zeroplan.report.catalog import model_table, model_text
from zeroplan.resolve import own_folder
from zeroplan.spec.family import FAMILIES
from zeroplan.transformer.params import active_parameter_count, parameter_count
from zeroplan.units import MB, parse_count

models_app = typer.Typer(help="List the models in the catalogue.", invoke_without_command=True, no_args_is_help=False)


@models_app.callback()
def list_models(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Every shape with its source, as JSON.")] = False,
    family: Annotated[str | None, typer.Option(metavar="FAMILY", help="Only this architecture's.")] = None,
    moe: Annotated[
        bool | None, typer.Option("--moe/--dense", help="Only mixtures of experts, or only dense models.", show_default=False)
    ] = None,
    min_params: Annotated[str | None, typer.Option(metavar="COUNT", help="At least this many parameters, such as 7b.")] = None,
    max_params: Annotated[str | None, typer.Option(metavar="COUNT", help="At most this many parameters.")] = None,
    matching: Annotated[str | None, typer.Option(metavar="TEXT", help="Names that contain this text.")] = None,
    catalog: Catalog = None,
) -> None:
    """List models by size: parameters, active parameters, shape."""
    if context.invoked_subcommand is not None:
        return
    if family is not None and family not in FAMILIES:
        raise unknown_name("architecture", family, FAMILIES, "`zeroplan models` lists all")
    least = 0 if min_params is None else parse_count(min_params, what="--min-params")
    if min_params is not None and min_params.isdigit() and least < MB:
        raise SpecError(
            f"--min-params {min_params} is {least:,} parameters, fewer than any model has; write {min_params}b, say"
        )
    most = 10**18 if max_params is None else parse_count(max_params, what="--max-params")
    chosen = [
        one
        for one in sorted(models(extra=own_folder(folder(catalog), "models")), key=lambda one: parameter_count(one.spec))
        if (family is None or one.spec.family == family)
        and (moe is None or (one.spec.moe is not None) == moe)
        and least <= parameter_count(one.spec) <= most
        and (matching is None or matching.lower() in one.name)
    ]
    typer.echo(json_text([_payload(one) for one in chosen]) if as_json else model_table(chosen))
    if not as_json and len(chosen) == len(models(extra=own_folder(folder(catalog), "models"))):
        typer.echo("\n" + fill(f"traced where torch is installed: {', '.join(traced_names())}", 100, break_on_hyphens=False))


@models_app.command("show")
def show_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model's name, an alias, or its name on the Hub.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    catalog: Catalog = None,
) -> None:
    """Show one model: shape, parameters tensor by tensor, published count and source."""
    found = model_entry(name, extra=own_folder(folder(catalog), "models"))
    typer.echo(json_text(_payload(found)) if as_json else model_text(found))


def _payload(entry: ModelEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "parameters": parameter_count(entry.spec),
        "active_parameters": active_parameter_count(entry.spec),
        **asdict(entry),
    }
