"""Which optional packages are installed, and which commands work with them? It finds out without importing them."""

import platform
import re
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple


class Package(NamedTuple):
    """A dependency: its name on PyPI, its module, and the extra of zeroplan that installs it."""

    name: str
    module: str
    extra: str


DIFFUSERS_PACKAGE = Package("diffusers", "diffusers", "diffusion")
PACKAGES = (
    Package("pydantic", "pydantic", ""),
    Package("typer", "typer", ""),
    Package("rich", "rich", ""),
    Package("pyyaml", "yaml", ""),
    Package("numpy", "numpy", ""),
    Package("matplotlib", "matplotlib", "plot"),
    Package("fastapi", "fastapi", "web"),
    Package("uvicorn", "uvicorn", "web"),
    Package("mcp", "mcp", "agents"),
    Package("torch", "torch", "verify"),
    Package("transformers", "transformers", "verify"),
    Package("peft", "peft", "verify"),
    Package("bitsandbytes", "bitsandbytes", "verify"),
    Package("deepspeed", "deepspeed", "deepspeed"),
    Package("megatron-core", "megatron", "megatron"),
    Package("submitit", "submitit", "slurm"),
    DIFFUSERS_PACKAGE,
)
_BY_MODULE = {package.module: package for package in PACKAGES}


class Ability(NamedTuple):
    """A command or feature, and why it does not work here, if it does not."""

    what: str
    missing: str = ""
    """The missing packages and how to install them; empty if nothing is missing."""

    @property
    def works(self) -> bool:
        """Whether it works here."""
        return not self.missing


#: Commands and features, with the modules that each needs.
_ABILITIES = (
    (
        "estimate, plan, advise, compare, diagnose, report, plot --text, models, gpus",
        ("pydantic", "typer", "rich", "yaml", "numpy"),
    ),
    ("plot into a file or a window", ("matplotlib",)),
    ("explore", ("fastapi", "uvicorn")),
    ("mcp", ("mcp",)),
    ("profile", ("torch", "transformers")),
    ("profile, diffusion transformers", ("torch", "transformers", "diffusers", "peft")),
    ("verify --backend simulate", ("torch", "transformers")),
    ("verify --backend simulate, DeepSpeed", ("torch", "transformers", "deepspeed")),
    ("verify --backend simulate, Megatron-Core", ("torch", "transformers", "megatron")),
    ("verify --backend simulate, LoRA", ("torch", "transformers", "peft")),
    ("verify --backend simulate, QLoRA", ("torch", "transformers", "peft", "bitsandbytes")),
)


def installed(package: Package) -> str | None:
    """The installed version; None if the package is absent.

    >>> installed(Package("no-such-package", "no_such_package", "")) is None
    True
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  keeps start-up fast

    if find_spec(package.module) is None:
        return None
    try:
        return version(package.name)
    except PackageNotFoundError:
        return "of unknown version"


def not_installed(*modules: str, by: str = "") -> str:
    """Which of these modules are missing and how to install them; empty if none. ``by`` names the feature that needs them.

    >>> not_installed("pydantic", by="the page")
    ''
    """
    lacking = [module for module in modules if find_spec(module) is None]
    if not lacking:
        return ""
    several = len(lacking) > 1
    needed = f", and {by} needs {'them' if several else 'it'}" if by else ""
    return f"{' and '.join(lacking)} {'are' if several else 'is'} not installed{needed}: {_install(lacking)}"


def absent(*modules: str) -> str:
    """Which of these modules are missing or too old, and how to install them; empty if none.

    >>> absent("pydantic")
    ''
    """
    return not_installed(*modules) or next((said for module in modules if (said := _too_old(module))), "")


def _install(modules: list[str], *, upgrade: bool = False) -> str:
    extras = dict.fromkeys(_BY_MODULE[module].extra for module in modules if module in _BY_MODULE)
    named = ",".join(extra for extra in extras if extra)
    what = f'".[{named}]"' if named else "."  # the quotes work in every shell, cmd.exe included
    return f"pip install {'--upgrade ' if upgrade else ''}{what} in a clone of zeroplan"  # zeroplan is on no package index


def _too_old(module: str) -> str:
    package = _BY_MODULE.get(module)
    found, least = (None, None) if package is None else (installed(package), _least().get(package.name))
    if found is None or least is None or not found[:1].isdigit() or _parts(found) >= _parts(least):
        return ""
    return f"{module} {found} is older than {least}: {_install([module], upgrade=True)}"


def _parts(said: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison.

    >>> _parts("2.13.0+cpu") > _parts("2.9.1")
    True
    """
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", said)[0]))


@cache
def _least() -> dict[str, str]:
    """The minimum version of each package by zeroplan's metadata; the lowest one if several extras name it."""
    from importlib.metadata import PackageNotFoundError, requires  # noqa: PLC0415  keeps start-up fast

    try:
        asked = requires("zeroplan") or ()
    except PackageNotFoundError:  # zeroplan runs from its source and is not installed
        return {}
    said = [(found[1], found[2]) for one in asked if (found := re.match(r"([\w.-]+)(?:\[.*?\])?>=([\d.]+)", one))]
    return dict(sorted(said, key=lambda one: _parts(one[1]), reverse=True))


def abilities(gpus: Callable[[], str], dry_runs: Callable[[], str]) -> tuple[Ability, ...]:
    """Every command and whether it works here.

    ``gpus`` and ``dry_runs`` return why real GPUs and dry runs on a fake GPU do not work; they are called if torch is installed.
    """
    found = [Ability(what, absent(*modules)) for what, modules in _ABILITIES]
    found.append(Ability("dryrun", absent("torch") or dry_runs()))
    without = absent("torch", "transformers")
    found.append(Ability("verify --backend cpu", without or _no_gloo()))
    found.append(Ability("verify --backend cuda", without or gpus()))
    no_slurm = "" if shutil.which("sbatch") else "sbatch is not on this machine's path: start from a login node of the cluster"
    found.append(Ability("verify --slurm", absent("torch", "transformers", "submitit") or no_slurm))
    return tuple(found)


def _no_gloo() -> str:
    return "" if platform.system() in ("Linux", "Darwin") else f"ranks as processes are not supported on {platform.system()}"
