"""Traces a model that zeroplan has no formulas for, automatically, and caches the profile of its ``config.json``.

The trace runs in a child process (``zeroplan profile``), which fakes a GPU for torch. It needs torch and transformers; without
them the error for a model without formulas says what to install.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zeroplan.catalog.config import is_content, named_after, read_config
from zeroplan.catalog.diffusion import is_diffuser, left_out, picture_of
from zeroplan.catalog.profile import read_profile
from zeroplan.current_folder import environment
from zeroplan.errors import MeasurementError, NoFormulasError, SpecError
from zeroplan.installation import PACKAGES, installed, not_installed
from zeroplan.resolve import Request, recipe_of
from zeroplan.spec.profile import SCHEMA_VERSION
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.profiled import profile_of
from zeroplan.whole import write_whole

#: Engines that can be estimated from a profile.
_ENGINES = ("ddp", "fsdp2", "deepspeed")
#: The traced length if a profile cannot cover all lengths and the user gave none. [tokens]
_USUAL_SEQ_LEN = 4096
#: The exit code of `zeroplan profile` for input that it refuses.
_REFUSED = 2


class Traced(NamedTuple):
    """A request, with the model replaced by its profile if that was necessary, and notes on the trace for the user."""

    request: Request
    notes: tuple[str, ...] = ()


def with_own_profile(
    request: Request, *, say: Callable[[str], None], chosen: tuple[str, ...] = (), every: bool = False
) -> Traced:
    """Return the request with a profile of its ``config.json``, if zeroplan has no formulas for that model.

    The profile covers the engine and recomputation of the request's recipe; with ``every`` all of them, for a search.
    A trace takes 10 s to some minutes; ``say`` receives a line when it begins.

    Raises NoFormulasError, which says what to install, if torch or transformers is missing; MeasurementError if the trace fails;
    and SpecError for a file that is not a configuration.
    """
    source = request.config or request.fetched
    if not source or is_content(source) or request.treat_as is not None:
        return Traced(request)
    try:
        read_config(Path(source))
    except NoFormulasError as unknown:
        return _profiled(request, unknown, say, chosen, every=every)
    except SpecError:  # `resolve` raises it again with more context
        pass
    return Traced(request)


def _profiled(
    request: Request, unknown: NoFormulasError, say: Callable[[str], None], chosen: tuple[str, ...], *, every: bool
) -> Traced:  # fmt: skip
    recipe = recipe_of(request, chosen=chosen)
    if recipe.engine not in _ENGINES:
        return Traced(request)
    wanted = _Wanted.of(request, recipe, every=every)
    if lacking := not_installed(*wanted.modules, by="tracing the model itself"):
        raise NoFormulasError(f"{unknown}; {lacking}") from None
    kept = next((one for one in wanted.kept() if _is_readable(one)), None)
    file = kept or _made(wanted, unknown, say)
    profile = profile_of(read_profile(str(file)))
    releases = " and ".join(f"{name} {release}" for name, release in profile.packages.items())
    note = f"no formulas for {profile.name}: the model's own code was traced, with {releases} ({file})"
    if kept:
        say(f"note: {note}")
    request = replace(request, config=None, model=None, fetched=None, profile=str(file))
    if not is_diffuser(wanted.keys):
        return Traced(request, (note,))
    traced = replace(request, image_size=None, frames=None, text_tokens=None, lora_rank=None, lora_targets=None)
    return Traced(traced, (note, left_out(wanted.keys)))


class _Wanted(NamedTuple):
    """The profile that a request needs: its config file, its name, and the flags of `zeroplan profile`."""

    file: Path
    name: str
    flags: tuple[str, ...]
    seq_len: int
    keys: Mapping[str, object]
    """The keys of the config file."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the trace imports."""
        return ("torch", "transformers", *(("diffusers", "peft") if is_diffuser(self.keys) else ()))

    @classmethod
    def of(cls, request: Request, recipe: RecipeSpec, *, every: bool) -> "_Wanted":
        """Return the profile that this request and recipe need."""
        path = Path(request.config or str(request.fetched))
        file = path / "config.json" if path.is_dir() else path
        precision = "bf16-mixed" if recipe.precision == "fp16-mixed" else recipe.precision  # both have the same bytes
        attention = "eager" if recipe.attention == "eager" else "sdpa"
        flags = ["--precision", precision, "--attention", attention]
        if not every:
            flags += ["--engine", recipe.engine, "--recompute", recipe.recompute]
        name = str(request.model) if request.fetched else named_after(path, file)
        keys = json.loads(file.read_text(encoding="utf-8"))
        flags += _of_a_picture(request, keys) if is_diffuser(keys) else []
        return cls(file, name, tuple(flags), request.seq_len or _USUAL_SEQ_LEN, keys)

    def kept(self) -> Iterator[Path]:
        """Yield the paths where it may be cached: a profile for every sequence length, then one for this length."""
        made_of = (
            SCHEMA_VERSION,
            _releases(self.modules),
            _own_code(),
            self.name,
            self.flags,
            self.file.read_text(encoding="utf-8"),
        )
        key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
        stem = "".join(sign if sign.isalnum() or sign in "-._" else "-" for sign in self.name).strip(".-")
        yield cache_folder() / f"{stem}-{key}.json"
        yield cache_folder() / f"{stem}-{key}-{self.seq_len}.json"


def _of_a_picture(request: Request, keys: Mapping[str, object]) -> list[str]:
    """Return the flags of `zeroplan profile` for a picture of a diffusion transformer, all of them filled in.

    Raises SpecError for options of adapters that are not traced.
    """
    for flag, value in (
        ("--quantize", request.quantize), ("--lora-dropout", request.lora_dropout), ("--lora-compute", request.lora_compute),
        ("--lora-base", request.lora_base), ("--lora-runs", request.lora_runs), ("--upcast", request.upcast),
        ("--images", request.images), ("--freeze", request.freeze),
    ):  # fmt: skip
        if value not in (None, "none", False):
            raise SpecError(f"{flag} with a transformer of diffusers is not modelled; leave it out")
    rank, targets = request.lora_rank, request.lora_targets
    found = picture_of(
        keys, size=request.image_size, frames=request.frames, text=request.text_tokens, rank=rank, targets=targets
    )
    flags = ["--image-size", f"{found.width}x{found.height}", "--frames", str(found.frames), "--text-tokens", str(found.text)]
    return [*flags, "--lora-rank", str(found.rank), "--lora-targets", ",".join(found.targets)] if found.rank else flags


def cache_folder() -> Path:
    """The folder of cached profiles: ``zeroplan/profiles`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "zeroplan" / "profiles"


def _releases(modules: tuple[str, ...]) -> dict[str, str | None]:
    return {package.name: installed(package) for package in PACKAGES if package.module in modules}


def _own_code() -> str:
    """A hash of the tracing code, so that profiles of older code are not reused."""
    digest = hashlib.sha256()
    for file in sorted((Path(__file__).parent / "verify").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_readable(file: Path) -> bool:
    """Whether the file is a valid profile; damaged ones are traced again."""
    try:
        read_profile(str(file))
    except SpecError:
        return False
    return True


def _made(wanted: _Wanted, unknown: NoFormulasError, say: Callable[[str], None]) -> Path:
    """Trace the model, cache its profile and return the path; a temporary folder if the cache cannot be written."""
    say(f"no formulas for {wanted.name}: tracing the model's own code, once (10 s to some minutes)")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "profile.json"
        _trace(wanted, made, unknown)
        text = made.read_text(encoding="utf-8")
    data = json.loads(text)
    file = wanted.file.absolute()
    data["name"] = wanted.name + data["name"].removeprefix(named_after(file, file))  # which may say what was traced
    of_all_lengths, of_one = wanted.kept()
    one_length = data.get("seq_len") is not None or data.get("shortest", 1) > 1
    return _keep(of_one if one_length else of_all_lengths, json.dumps(data, indent=1, ensure_ascii=False) + "\n", say)


def _trace(wanted: _Wanted, out: Path, unknown: NoFormulasError) -> None:
    command = [sys.executable, "-m", "zeroplan", "profile", "--config", str(wanted.file.absolute()), *wanted.flags,
               "--fallback-seq-len", str(wanted.seq_len), "--out", str(out)]  # fmt: skip
    ended = subprocess.run(  # noqa: S603  our own program
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environment()
    )
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"it ended with code {ended.returncode}"])[-1].removeprefix("zeroplan: ")
        kind = NoFormulasError if ended.returncode == _REFUSED else MeasurementError
        raise kind(f"{unknown}; tracing its own code failed: {last}") from None


def _keep(path: Path, text: str, say: Callable[[str], None]) -> Path:
    try:
        write_whole(path, text, force=True)
    except OSError as error:
        path = Path(tempfile.mkdtemp(prefix="zeroplan-")) / path.name
        write_whole(path, text, force=True)
        say(f"note: the profile is not kept for the next time: {cache_folder()} cannot be written to ({error.strerror})")
    return path
