"""What transformers itself makes of a config: the authority that parameter layouts and the config reader are held against."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import zeroplan.catalog.model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

os.environ["HF_HUB_OFFLINE"] = "1"
ENTRIES = Path(zeroplan.catalog.model.__file__).parent / "models"
ENTRY_NAMES = sorted(path.stem for path in ENTRIES.glob("*.toml"))


def shipped_config(name: str) -> dict[str, object]:
    """The config.json that a catalogue entry stands for."""
    entry = tomllib.loads((ENTRIES / f"{name}.toml").read_text())
    return {"model_type": entry["model_type"], **entry["config"], **dict.fromkeys(entry.get("nulls", []))}


def hub_config(config: Mapping[str, object]) -> PreTrainedConfig:
    """``config`` as transformers' own class reads it."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    return AutoConfig.for_model(**config)


def meta_model(config: Mapping[str, object]) -> PreTrainedModel:
    """The causal language model that transformers builds from ``config``, without memory for its tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hub_config(config))
