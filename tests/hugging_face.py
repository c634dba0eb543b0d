"""Builds configs and models with transformers itself, against which tests check parameter layouts and the config reader."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import zeroplan.catalog.model
from zeroplan.catalog.model import with_nulls

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

os.environ["HF_HUB_OFFLINE"] = "1"
ENTRIES = Path(zeroplan.catalog.model.__file__).parent / "models"
ENTRY_NAMES = sorted(path.stem for path in ENTRIES.glob("*.toml"))


def shipped_config(name: str) -> dict[str, object]:
    """The config.json of a catalogue entry."""
    entry = tomllib.loads((ENTRIES / f"{name}.toml").read_text())
    return {"model_type": entry["model_type"], **entry["config"], **with_nulls(entry.get("nulls", []))}


#: The entries without a vision tower, whose parameters have transformers' names.
TEXT_NAMES = [name for name in ENTRY_NAMES if "[config.vision_config]" not in (ENTRIES / f"{name}.toml").read_text()]


def hub_config(config: Mapping[str, object]) -> PreTrainedConfig:
    """The configuration as transformers reads it."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)
    return transformers.AutoConfig.for_model(**config)


def meta_model(config: Mapping[str, object]) -> PreTrainedModel:
    """The language model that transformers builds for ``config`` on the meta device, with its vision tower if it has one."""
    transformers = pytest.importorskip("transformers")
    kind = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    with pytest.importorskip("torch").device("meta"):
        return kind.from_config(hub_config(config))
