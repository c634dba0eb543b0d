"""Lists the function that makes each generated part of a page."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from tests.docs.generated import allocator, blocks, commands, compared, layers, ledger, records, scripts, steps, words

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS: dict[str, Callable[..., str]] = {
    "states": ledger.states,
    "moments": ledger.moments,
    "traffic": ledger.traffic,
    "volumes": ledger.volumes,
    "saved": blocks.saved,
    "autocast": blocks.autocast,
    "backward": blocks.backward,
    "loss": blocks.loss,
    "outside": blocks.outside,
    "legend": blocks.legend_of_the_model,
    "optimizers": steps.optimizers,
    "optimizer-symbols": steps.optimizer_symbols,
    "less-precision": steps.less_precision,
    "muon": compared.muon,
    "losses": compared.losses,
    "imbalance": compared.imbalance,
    "workspaces": steps.workspaces,
    "outside-the-allocator": steps.outside_the_allocator,
    "device-figures": steps.device_figures,
    "bands": steps.bands,
    "step-time": steps.parts_of_a_step,
    "shares": steps.shares,
    "kinds": words.kinds,
    "phases": words.phases,
    "numbers": words.numbers,
    "choices": words.choices,
    "engines": words.engines,
    "options": words.options,
    "members": words.members,
    "engine-symbols": words.engine_symbols,
    "commands": commands.commands,
    "job-flags": commands.job_flags,
    "truth": records.truth,
    "card-times": records.card_times,
    "step-times": records.step_times,
    "step-pairs": records.step_pairs,
    "calibrated": records.calibrated,
    "shared-deviations": records.shared_deviations,
    "megatron-runs": records.megatron_runs,
    "megatron-refused": records.megatron_refused,
    "scripts": scripts.table_of_programs,
    "asked": scripts.table_of_answers,
    "reserved": allocator.reserved,
    "pressed": allocator.pressed,
    "replayed": allocator.replayed,
    "layers": layers.table_of_layers,
}


@cache
def made(name: str, *arguments: str) -> str:
    """Return a generated part of a page."""
    return "\n" + PARTS[name](*arguments)
