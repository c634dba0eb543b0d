"""What transformers itself makes of a config: the authority that parameter layouts and the config reader are held against."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import zeroplan.catalog.model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

os.environ["HF_HUB_OFFLINE"] = "1"
ENTRIES = Path(zeroplan.catalog.model.__file__).parent / "models"
ENTRY_NAMES = sorted(path.stem for path in ENTRIES.glob("*.toml"))


def shipped_config(name: str) -> dict[str, object]:
    """Write out the config.json that a catalogue entry stands for."""
    entry = tomllib.loads((ENTRIES / f"{name}.toml").read_text())
    return {"model_type": entry["model_type"], **entry["config"], **dict.fromkeys(entry.get("nulls", []))}


def hub_config(config: Mapping[str, object]) -> PreTrainedConfig:
    """Read ``config`` with transformers' own class."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoConfig.for_model(**config)


def meta_model(config: Mapping[str, object]) -> PreTrainedModel:
    """Build the causal language model of ``config`` as transformers does, without memory for its tensors."""
    with pytest.importorskip("torch").device("meta"):
        return pytest.importorskip("transformers").AutoModelForCausalLM.from_config(hub_config(config))
