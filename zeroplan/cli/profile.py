"""``zeroplan profile``: how much memory does a module without formulas need? Traces it and writes a file for ``--profile``."""

import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from zeroplan.cli import say
from zeroplan.cli.flags import Force, flag
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


_Workload = Annotated[
    str | None,
    flag("--workload", "PACKAGE.MODULE:FUNCTION", "Your own module, example batch and loss, as `zeroplan verify` takes it."),
]
_Config = Annotated[str | None, flag("--config", "PATH", "A config.json of transformers, or a folder that contains one.")]
_Attention = Annotated[
    str, flag("--attention", "|".join(_ATTENTION), "The attention that the module of a config.json uses.", shown=True)
]
_Engine = Annotated[str | None, flag("--engine", "|".join(_ENGINES), "Trace for this engine only. (default: for all)")]
_Precision = Annotated[
    str | None, flag("--precision", "|".join(_PRECISIONS), "Trace in this precision only. (default: in all)")
]
_Recompute = Annotated[
    str | None, flag("--recompute", "|".join(_RECOMPUTE), "Trace with this recomputation only. (default: with each)")
]
_SeqLen = Annotated[
    str | None,
    flag(
        "--seq-len", "TOKENS", "Profile sequences of this length and longer only, for modules that run short ones differently."
    ),
]
_FallbackSeqLen = Annotated[
    str | None,
    flag("--fallback-seq-len", "TOKENS", "The same as --seq-len, but only if one profile for all lengths is impossible."),
]
_ImageSize = Annotated[str | None, flag("--image-size", "WxH", "Pixels of a picture, for a diffusion transformer.")]
_Frames = Annotated[str | None, flag("--frames", "N", "Frames of a video, for a diffusion transformer of videos.")]
_TextTokens = Annotated[str | None, flag("--text-tokens", "N", "Tokens of the text beside a picture.")]
_LoraRank = Annotated[str | None, flag("--lora-rank", "N", "Train adapters of this rank in a diffusion transformer.")]
_LoraTargets = Annotated[
    str | None,
    flag("--lora-targets", "NAMES", "The layers that get adapters: attention, or the ends of names such as to_q,to_k."),
]
_Out = Annotated[str, flag("--out", "FILE", "Where to write the profile.", shown=True)]


def profile_command(
    *,
    workload: _Workload = None,
    config: _Config = None,
    attention: _Attention = "sdpa",
    engine: _Engine = None,
    precision: _Precision = None,
    recompute: _Recompute = None,
    seq_len: _SeqLen = None,
    fallback_seq_len: _FallbackSeqLen = None,
    image_size: _ImageSize = None,
    frames: _Frames = None,
    text_tokens: _TextTokens = None,
    lora_rank: _LoraRank = None,
    lora_targets: _LoraTargets = None,
    out: _Out = "profile.json",
    force: Force = False,
) -> None:
    """Trace a module once on fake tensors and write a file for --profile, which estimates it for any batch."""
    if (workload is None) == (config is None):
        raise SpecError("a profile describes one module; use either --workload PACKAGE.MODULE:FUNCTION or --config PATH")
    if not out:
        raise SpecError("--out '' names no file; give the path of the profile to write")
    chosen = (_one_of("--engine", engine, _ENGINES), _one_of("--precision", precision, _PRECISIONS),
            _one_of("--recompute", recompute, _RECOMPUTE), _one_of("--attention", attention, _ATTENTION))  # fmt: skip
    refuse_target(Path(out), "--out", force=force, new_folder=True)
    if lacking := not_installed("torch", "transformers", by="tracing"):
        raise MeasurementError(lacking)
    lengths = (_tokens("--seq-len", seq_len), _tokens("--fallback-seq-len", fallback_seq_len))
    if None not in lengths:
        raise SpecError("--fallback-seq-len has no effect beside --seq-len; leave one out")
    counts = {"frames": ("--frames", frames), "text": ("--text-tokens", text_tokens), "rank": ("--lora-rank", lora_rank)}
    picture = {"size": image_size, "targets": lora_targets, **{name: _count(*one) for name, one in counts.items()}}
    found = _traced(workload, config, *chosen, lengths=lengths, picture=picture)
    _write(found, Path(out), force=force)
    _summarise(found, out)


def _one_of(flag: str, chosen: str | None, there: tuple[str, ...]) -> tuple[str, ...]:
    if chosen is not None and chosen not in there:
        raise SpecError(f"{flag} {chosen!r} is none of {', '.join(there)}")
    return there if chosen is None else (chosen,)


def _count(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_count(text, what=flag, examples="16 or 512", most=10**6)


def _tokens(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_tokens(text, what=flag)


def _traced(
    workload: str | None, config: str | None, engines: tuple[str, ...], precisions: tuple[str, ...], recompute: tuple[str, ...],
    attention: tuple[str, ...], lengths: tuple[int | None, int | None], picture: Mapping[str, object],
) -> "Profile":  # fmt: skip
    """Return the profile; ``lengths``: --seq-len and its fallback. Errors of the user's workload get their own message."""
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")  # the trace fakes GPUs, so real ones are hidden
    import warnings  # noqa: PLC0415  only a trace needs these

    from zeroplan.verify.failures import cause_of, hint, text_of, workload_raised  # noqa: PLC0415
    from zeroplan.verify.profiling.profile import Wanted, profile  # noqa: PLC0415
    from zeroplan.verify.profiling.subject import of_workload  # noqa: PLC0415

    wanted = Wanted(engines, precisions, recompute, *lengths)  # type: ignore[arg-type]  # each is one of those above
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            subject = of_workload(workload) if workload is not None else _of_config(cast("str", config), attention[0], picture)
            return profile(subject, wanted, say=say)
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
