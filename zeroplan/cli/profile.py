"""``zeroplan profile``: how much memory does a module without formulas need? Traces it and writes a file for ``--profile``."""

import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from zeroplan.cli import say
from zeroplan.cli.flags import Force, flag, with_fields
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.installation import not_installed
from zeroplan.spec.base import Spec
from zeroplan.units import parse_count, parse_tokens
from zeroplan.whole import refuse_target, unwritten, write_whole

if TYPE_CHECKING:
    from zeroplan.spec.profile import Profile
    from zeroplan.verify.profiling.subject import Subject

_ENGINES = ("fsdp2", "ddp", "deepspeed")
_PRECISIONS = ("bf16-mixed", "bf16", "fp32")
_RECOMPUTE = ("none", "selective", "full")
_ATTENTION = ("sdpa", "eager")


#: The hint for a module that reads values of tensors: the trace uses fake tensors, which have none.
_NO_VALUES = "leave out what reads them (.item(), .tolist(), a branch on a value), or profile a variant without it"


class Flags(NamedTuple):
    """The values as typed."""

    workload: Annotated[
        str | None,
        flag(
            "--workload", "PACKAGE.MODULE:FUNCTION", "Your own module, example batch and loss, as `zeroplan verify` takes it."
        ),
    ] = None
    config: Annotated[str | None, flag("--config", "PATH", "A config.json of transformers, or a folder that contains one.")] = (
        None
    )
    attention: Annotated[
        str, flag("--attention", "|".join(_ATTENTION), "The attention that the module of a config.json uses.", shown=True)
    ] = "sdpa"
    engine: Annotated[str | None, flag("--engine", "|".join(_ENGINES), "Trace for this engine only. (default: for all)")] = None
    precision: Annotated[
        str | None, flag("--precision", "|".join(_PRECISIONS), "Trace in this precision only. (default: in all)")
    ] = None
    recompute: Annotated[
        str | None, flag("--recompute", "|".join(_RECOMPUTE), "Trace with this recomputation only. (default: with each)")
    ] = None
    seq_len: Annotated[
        str | None,
        flag(
            "--seq-len",
            "TOKENS",
            "Profile sequences of this length and longer only, for modules that run short ones differently.",
        ),
    ] = None
    fallback_seq_len: Annotated[
        str | None,
        flag("--fallback-seq-len", "TOKENS", "The same as --seq-len, but only if one profile for all lengths is impossible."),
    ] = None
    image_size: Annotated[str | None, flag("--image-size", "WxH", "Pixels of a picture, for a diffusion transformer.")] = None
    frames: Annotated[str | None, flag("--frames", "N", "Frames of a video, for a diffusion transformer of videos.")] = None
    text_tokens: Annotated[str | None, flag("--text-tokens", "N", "Tokens of the text beside a picture.")] = None
    lora_rank: Annotated[str | None, flag("--lora-rank", "N", "Train adapters of this rank in a diffusion transformer.")] = None
    lora_targets: Annotated[
        str | None,
        flag("--lora-targets", "NAMES", "The layers that get adapters: attention, or the ends of names such as to_q,to_k."),
    ] = None
    out: Annotated[str, flag("--out", "FILE", "Where to write the profile.", shown=True)] = "profile.json"
    force: Force = False

    @property
    def picture(self) -> dict[str, object]:
        """The values for a transformer of diffusers, by the keywords of :func:`zeroplan.catalog.diffusion.picture_of`."""
        counts = {"frames": self.frames, "text": self.text_tokens, "rank": self.lora_rank}
        found = {name: _count(_OF_PICTURES[name], text) for name, text in counts.items()}
        return {"size": self.image_size, "targets": self.lora_targets, **found}


@with_fields
def profile_command(*, flags: Flags) -> None:
    """Trace a module once on fake tensors and write a file for --profile, which estimates it for any batch."""
    if (flags.workload is None) == (flags.config is None):
        raise SpecError("a profile describes one module; use either --workload PACKAGE.MODULE:FUNCTION or --config PATH")
    if not flags.out:
        raise SpecError("--out '' names no file; give the path of the profile to write")
    manners = (_one_of("--engine", flags.engine, _ENGINES), _one_of("--precision", flags.precision, _PRECISIONS),
               _one_of("--recompute", flags.recompute, _RECOMPUTE))  # fmt: skip
    _one_of("--attention", flags.attention, _ATTENTION)
    path = Path(flags.out)
    refuse_target(path, "--out", force=flags.force, new_folder=True)
    if lacking := not_installed("torch", "transformers", by="tracing"):
        raise MeasurementError(lacking)
    lengths = (_tokens("--seq-len", flags.seq_len), _tokens("--fallback-seq-len", flags.fallback_seq_len))
    if None not in lengths:
        raise SpecError("--fallback-seq-len has no effect beside --seq-len; leave one out")
    found = _traced(flags, (*manners, *lengths))
    _write(found, path, force=flags.force)
    _summarise(found, flags.out)


def _one_of(flag: str, chosen: str | None, there: tuple[str, ...]) -> tuple[str, ...]:
    if chosen is not None and chosen not in there:
        raise SpecError(f"{flag} {chosen!r} is none of {', '.join(there)}")
    return there if chosen is None else (chosen,)


def _count(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_count(text, what=flag, examples="16 or 512", most=10**6)


def _tokens(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_tokens(text, what=flag)


def _traced(flags: Flags, wanted: tuple[object, ...]) -> "Profile":
    """Return the profile; ``wanted``: the fields of the profiler's request. Errors of the user's workload get their own message."""
    picture, workload = flags.picture, flags.workload
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")  # the trace fakes GPUs, so real ones are hidden
    import warnings  # noqa: PLC0415  only a trace needs these

    from zeroplan.verify.failures import cause_of, hint, text_of, workload_raised  # noqa: PLC0415
    from zeroplan.verify.profiling.profile import Wanted, profile  # noqa: PLC0415
    from zeroplan.verify.profiling.subject import of_workload  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            subject = of_workload(workload) if workload is not None else _of_config(str(flags.config), flags.attention, picture)
            return profile(subject, Wanted(*wanted), say=say)  # type: ignore[arg-type]  # the command has checked them
        except (SpecError, MeasurementError):
            raise
        except Exception as error:
            text = text_of(error)
            if cause_of(error) == "workload" and workload is not None:
                raise workload_raised(text, rank=0, say=say, instead=_NO_VALUES) from error
            last = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise MeasurementError(f"the module cannot be traced: {last}{hint(last, _NO_VALUES)}") from error


def _of_config(config: str, attention: str, picture: Mapping[str, object]) -> "Subject":
    """Return the model of a config.json of transformers or diffusers; ``picture`` is for one of diffusers alone."""
    from zeroplan.catalog.diffusion import is_diffuser  # noqa: PLC0415
    from zeroplan.verify.profiling.subject import config_file, of_config, of_diffuser, read_keys  # noqa: PLC0415

    if is_diffuser(read_keys(config_file(config))):
        if lacking := not_installed("diffusers", "peft", by="tracing a transformer of diffusers"):
            raise MeasurementError(lacking)
        return of_diffuser(config, picture)
    if flag := next((name for name, value in picture.items() if value is not None), None):
        raise SpecError(f"{_OF_PICTURES[flag]} is for a transformer of diffusers, and {config!r} is none; leave it out")
    return of_config(config, attention)  # type: ignore[arg-type]  # checked by the flag


_OF_PICTURES = {
    "size": "--image-size", "frames": "--frames", "text": "--text-tokens", "rank": "--lora-rank", "targets": "--lora-targets",
}  # fmt: skip


def _write(found: "Profile", path: Path, *, force: bool) -> None:
    import json  # noqa: PLC0415  start-up is part of every command's time

    try:
        write_whole(path, json.dumps(without_defaults(found), indent=1, ensure_ascii=False) + "\n", force=force)
    except OSError as error:
        raise unwritten(error) from None


def without_defaults(value: object) -> object:
    """Return a spec as plain data, without fields that have their default."""
    if isinstance(value, Spec):
        pairs = ((field.name, field.default, getattr(value, field.name)) for field in fields(value))
        return {
            name: without_defaults(one)
            for name, default, one in pairs
            if default is MISSING or one != default or name == "schema_version"
        }
    if isinstance(value, dict):
        return {key: without_defaults(one) for key, one in value.items()}
    return [without_defaults(one) for one in value] if isinstance(value, tuple) else value


def _summarise(found: "Profile", out: str) -> None:
    layers = ", ".join(f"{run.layers} x {run.kind}" for run in found.runs)
    typer.echo(f"{found.source}: {layers}; {len(found.variants)} manner{'s' if found.variants[1:] else ''} of execution")
    remarks = (remark for one in found.variants for part in (one.one, one.more) for remark in part.remarks)
    for remark in dict.fromkeys(remarks):
        typer.echo(f"not exact: {remark}")
    typer.echo(f"wrote {out}; use it as: zeroplan estimate --profile {out} --gpus 8 --stage 3", file=sys.stdout)
