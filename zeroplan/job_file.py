"""Reads a job from TOML or JSON: the flags as keys (``set`` as a list), or the complete ``job`` of an answer's JSON."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zeroplan.catalog.config import is_content
from zeroplan.catalog.text import each_key_once, one_line, read_text, shown, strict_json
from zeroplan.errors import SpecError
from zeroplan.resolve import Request, request_of
from zeroplan.settings import with_setting
from zeroplan.spec.base import read
from zeroplan.spec.job import JobSpec


def read_job_file(path: Path) -> Request:
    """Return the request in a job file. Relative paths in it, such as ``config``, are relative to the file's folder.

    Raises SpecError in one line for any other file; for another program's configuration it names the flag ``--from``.
    """
    try:
        return _request(path)
    except SpecError as error:
        raise SpecError(_belonging(path) or f"{error}{_no_file_but_a_name(path)}") from None


def _belonging(path: Path) -> str:
    """The message for another program's configuration file; empty for any other file."""
    from zeroplan.catalog.setups.reading import is_setup  # noqa: PLC0415  only an error pays for it

    try:
        return f"job file {str(path)!r} is another program's configuration file; give it to --from" if is_setup(path) else ""
    except SpecError:  # the caller reports unreadable files
        return ""


def _no_file_but_a_name(path: Path) -> str:
    try:
        meant = path.suffix not in (".toml", ".json") and not path.exists()
    except (OSError, ValueError):  # the name is too long or contains a NUL
        return ""
    return "; a model is named with --model, a size with --params" if meant else ""


def _request(path: Path) -> Request:
    data = _parsed(path, read_text(path, what="job file"))
    if not isinstance(data, dict):
        raise SpecError(f"job file {str(path)!r} holds a {type(data).__name__}, not keys and values; write params = 7e9, say")
    where = f"job file {str(path)!r}"
    if isinstance(data.get("model"), dict):
        return request_of(read(JobSpec, data, where=where))
    request = request_of_keys(_keys_of_flags(data), where=where)
    return replace(
        request,
        config=request.config if is_content(request.config or "") else _beside(path, request.config),
        profile=_beside(path, request.profile),
        deepspeed_config=_beside(path, request.deepspeed_config),
        from_file=_beside(path, request.from_file),
    )


def request_of_keys(data: Mapping[str, object], *, where: str) -> Request:
    """Return the request for the keys of a job; ``set`` is a text ``engine.option=value``, like the flag, or a list of them."""
    settings = data.get("set", [])
    said = [settings] if isinstance(settings, str) else settings
    if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
        raise SpecError(f'{where}: set is {shown(settings)}; write set = ["deepspeed.reduce_bucket_size=5e7"]')
    request = read(Request, {key: value for key, value in data.items() if key != "set"}, where=where)
    for setting in said:
        try:
            request = with_setting(request, setting)
        except SpecError as error:
            raise SpecError(f"{where}: {str(error).removeprefix('--')}") from None
    return request


def _beside(path: Path, named: str | None) -> str | None:
    """The path of a file that a job file names; relative ones are relative to the job file's folder."""
    return named if not named or Path(named).is_absolute() else str(path.parent / named)


def _parsed(path: Path, text: str) -> object:
    where = f"job file {str(path)!r}"
    if path.suffix.lower() == ".json":
        return strict_json(text, where)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise SpecError(f"{where} is nested too deep; write it flat") from None
    except ValueError as error:
        raise SpecError(f"{where} is not TOML (a JSON job file ends in .json): {one_line(str(error))}") from None


def _keys_of_flags(data: Mapping[str, object]) -> dict[str, object]:
    """The keys with underscores; the file may also use the flags' spelling, ``seq-len``."""
    pairs = (("from_file" if key == "from" else key.replace("-", "_"), value) for key, value in data.items())
    return each_key_once(pairs, "the job file")
