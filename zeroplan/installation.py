"""What is installed here beside zeroplan itself, what needs it, and what can therefore be done? Nothing is imported to find out."""

import platform
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple


class Package(NamedTuple):
    """A package that something needs: what it is called on PyPI, how it is imported, the extra that brings it."""

    name: str
    module: str
    extra: str


PACKAGES = (
    Package("numpy", "numpy", ""),
    Package("matplotlib", "matplotlib", "plot"),
    Package("fastapi", "fastapi", "web"),
    Package("uvicorn", "uvicorn", "web"),
    Package("torch", "torch", "verify"),
    Package("transformers", "transformers", "verify"),
    Package("peft", "peft", "verify"),
    Package("bitsandbytes", "bitsandbytes", "verify"),
    Package("deepspeed", "deepspeed", "deepspeed"),
    Package("submitit", "submitit", "slurm"),
)
_BY_MODULE = {package.module: package for package in PACKAGES}


class Ability(NamedTuple):
    """Something that can be done or not, and why not."""

    what: str
    missing: str = ""
    """What is missing and the way out; empty where nothing is."""

    @property
    def works(self) -> bool:
        """Whether it can be done here."""
        return not self.missing


#: What can be done beyond estimating and planning, and the modules it asks for.
_ABILITIES = (
    ("estimate, plan, compare, diagnose", ()),
    ("plot, report", ("matplotlib",)),
    ("explore", ("fastapi", "uvicorn")),
    ("profile", ("torch", "transformers")),
    ("verify --backend simulate", ("torch", "transformers")),
    ("verify --backend simulate, DeepSpeed", ("torch", "transformers", "deepspeed")),
    ("verify --backend simulate, LoRA", ("torch", "transformers", "peft")),
    ("verify --backend simulate, QLoRA", ("torch", "transformers", "peft", "bitsandbytes")),
)


def installed(package: Package) -> str | None:
    """The version that is installed; None where it is absent.

    >>> installed(Package("no-such-package", "no_such_package", "")) is None
    True
    """
    if find_spec(package.module) is None:
        return None
    try:
        return version(package.name)
    except PackageNotFoundError:
        return "of unknown version"


def absent(*modules: str) -> str:
    """What is missing of these modules and how to get it; empty where nothing is.

    >>> absent("pydantic")
    ''
    """
    lacking = [module for module in modules if find_spec(module) is None]
    if not lacking:
        return ""
    extras = dict.fromkeys(_BY_MODULE[module].extra for module in lacking if module in _BY_MODULE)
    names = " and ".join(lacking)
    return f"{names} {'is' if len(lacking) == 1 else 'are'} not installed: pip install 'zeroplan[{','.join(extras)}]'"


def abilities(gpus: Callable[[], str]) -> tuple[Ability, ...]:
    """What works here. ``gpus`` says why there is no GPU to run on, and is asked only where torch is installed."""
    found = [Ability(what, absent(*modules)) for what, modules in _ABILITIES]
    without = absent("torch", "transformers")
    found.append(Ability("verify --backend cpu", without or _no_gloo()))
    found.append(Ability("verify --backend cuda", without or gpus()))
    no_slurm = "" if shutil.which("sbatch") else "sbatch is not on this machine's path: start from a login node of the cluster"
    found.append(Ability("verify --slurm", absent("torch", "transformers", "submitit") or no_slurm))
    return tuple(found)


def _no_gloo() -> str:
    return "" if platform.system() in ("Linux", "Darwin") else f"ranks as processes are not supported on {platform.system()}"
