"""Runs blocks whose linear attention fla, mamba_ssm and causal-conv1d run, and saves their bytes.

``python -m tests.transformer.measured_linear_kernels`` adds what ``linear_kernels.json`` lacks where the packages are installed:
fla-core and flash-linear-attention without dependencies, and the folders ``causal_conv1d`` and ``mamba_ssm`` of the other two
packages' sources. Triton is not needed.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from tests.transformer.drawn_blocks import drawn, run_of, with_padding
from tests.transformer.fake_blocks import BlockRun
from tests.transformer.linear_kernels import install_kernels, releases
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.family import TRAITS
from zeroplan.spec.linear_kernels import runs_by_kernels
from zeroplan.spec.recipe import LINEAR_KERNELS, RecipeSpec
from zeroplan.transformer.parameters import WITH_STATES, plain_kind
from zeroplan.verify.fake_cuda.installed import install_node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.transformer.drawn_blocks import Case

SAVED = Path(__file__).with_name("linear_kernels.json")
#: Families with such kernels.
FAMILIES = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid", "granitemoehybrid", "nemotron_h", "bamba",
    "falcon_h1",
)  # fmt: skip
_OF_MAMBA = FAMILIES[5:]
#: Families that share their operators with others.
_ALIKE = ("olmo_hybrid", *_OF_MAMBA)
#: How blocks are drawn: all weights trained, with adapters in all linear layers, with padding in the batch, and, where attention
#: and Mamba-2 are side by side, with little beside Mamba-2, so that it has the peak.
MANNERS = ("trained", "adapted", "padded", "narrow")
#: Cases of each family and manner; fewer of families that share their operators with others.
CASES, CASES_OF_MAMBA = 12, 4


def case_of(family: str, manner: str, number: int) -> Case | None:
    """Return a block of this number; None if it has no linear attention."""
    draw = Random(f"{family} {number}")  # noqa: S311  draws tests
    case = with_padding(draw, family) if manner == "padded" else drawn(draw, family)
    if plain_kind(case.spec, case.layers.kind) not in WITH_STATES or (manner == "narrow" and not TRAITS[family].one_kind):
        return None
    if manner == "narrow":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
        case = case._replace(spec=replace(case.spec, intermediate_size=32, **heads))
    recipe = RecipeSpec(engine="ddp", zero_stage=0)
    if not runs_by_kernels(case.spec, recipe):
        return None
    if manner == "adapted" and family == "kimi_linear":
        return None  # its adapters are not modelled
    if manner == "adapted":
        compute = case.compute._replace(autocast=False, recompute="full" if number % 2 else "none")
        targets = "all-linear" if TRAITS[family].adapted_output else "attention,mlp,in_proj"  # as peft has it
        case = case._replace(spec=replace(case.spec, adapter=AdapterSpec(rank=4, targets=targets)), compute=compute)
    return case._replace(compute=case.compute._replace(fused=(LINEAR_KERNELS,)))


def cases() -> Iterator[tuple[str, Case]]:
    """Yield every case with its name."""
    for family in FAMILIES:
        for manner in MANNERS:
            numbered = ((number, case_of(family, manner, number)) for number in range(10 * CASES))
            there = [(f"{family}, {manner}, {number}", case) for number, case in numbered if case is not None]
            yield from there[: CASES_OF_MAMBA if family in _ALIKE else CASES]


def saved() -> dict[str, BlockRun]:
    """Return the saved run of every case."""
    return {name: BlockRun(*row) for name, row in json.loads(SAVED.read_text(encoding="utf-8"))["blocks"].items()}


def measured(case: Case) -> BlockRun:
    """Run a block by the kernels, in a process that has not imported transformers' models yet."""
    install_node()
    install_kernels()
    return run_of(case)


def main() -> None:
    """Run every case that has no saved run, and save all."""
    before = saved() if SAVED.exists() else {}
    rows = {name: before.get(name) or measured(case) for name, case in cases()}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    text = f'{{\n  "releases": {json.dumps(releases())},\n  "blocks": {{\n{lines}\n  }}\n}}\n'
    SAVED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
