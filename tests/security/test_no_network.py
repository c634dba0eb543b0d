"""No model name makes a command reach the network, unless it names the Hub. For runs of engines see ``test_current_folder``."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.security.watched import MODULE, Watched


@pytest.mark.parametrize(("arguments", "code"), [
    (("estimate", "--model", "mine/good", "--gpus", "2"), 2),
    (("estimate", "--from", "args.json", "--gpus", "2"), 2),
    (("plan", "--model", "mine/good", "--gpus", "2", "--gpu", "l4-24gb"), 2),
], ids=["estimate", "from", "plan"])  # fmt: skip
def test_a_name_in_the_hubs_form_fetches_nothing(tmp_path: Path, arguments: tuple[str, ...], code: int):
    watched = Watched(tmp_path)
    (watched.folder / "args.json").write_text(json.dumps({"model_name_or_path": "mine/good", "output_dir": "x"}))
    watched.run(*MODULE, *arguments, code=code)
    assert watched.reached() == ""


@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed")
def test_a_name_with_hf_asks_the_hub(tmp_path: Path):
    watched = Watched(tmp_path)
    watched.run(*MODULE, "estimate", "--model", "hf:mine/good", code=2)
    assert "hub.invalid" in watched.reached()
