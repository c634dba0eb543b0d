"""Reads a job from OpenRLHF's arguments.

Keys are those of the commit that docs/from-a-file.md lists (openrlhf/cli/), and the flat names of earlier releases, with
OpenRLHF's defaults for keys left out. For PPO, the job is the actor's update. OpenRLHF passes its own configuration to DeepSpeed
(utils/deepspeed/deepspeed_utils.py).
"""

from pathlib import Path

from zeroplan.catalog.setups.keys import keys_of
from zeroplan.catalog.setups.settings import FILLED, FlatTable, Reading, Table
from zeroplan.catalog.setups.setup import DeepSpeedPart, Setup

_UPDATE = "only the actor's update is counted: `zeroplan workflow ppo` also has the other models and the rollout engine"
_PAIRS = "pairs are counted as two sequences; the reference model is not counted (`zeroplan workflow dpo`)"


def openrlhf_setup(whole: Table, folder: Path, _: int | None) -> Setup:
    """Return the job in the arguments; raises SpecError for settings that are not modelled."""
    todays = keys_of("openrlhf").instead  # names of keys before 0.10
    table = FlatTable({todays.get(key, key): value for key, value in whole.data.items()}, whole.where)
    reading = Reading(table, folder)
    part = "actor" if table.data.get("actor.model_name_or_path") or "actor.num_nodes" in table.data else "model"
    is_policy, compares = part == "actor", any(key.startswith(("dpo.", "ref.")) for key in table.data)
    gpus = table.count("launched_gpus")
    if is_policy:
        gpus = (table.count("actor.num_nodes") or 1) * (table.count("actor.num_gpus_per_node") or 8)
        reading.notes.append(_UPDATE)
    elif compares:
        table.matters["ref"] = _PAIRS
    if gpus is not None:
        reading.set("gpus", "GPUs", gpus)
    named = next((key for key in (f"{part}.model_name_or_path", "model.model_name_or_path") if table.text(key)), None)
    if named is not None:
        reading.set_model(named, str(table.data[named]))
    reading.set_frozen_tower("actor.freeze_visual_encoder")
    _batch(reading, gpus or 1, twice=compares and not is_policy, each=1 if is_policy else 8)
    recomputes = table.switch(f"{part}.gradient_checkpointing_enable") or table.switch("model.gradient_checkpointing_enable")
    reading.set("recompute", f"{part}.gradient_checkpointing_enable", "full" if recomputes else "none")
    word = str(table.get("ds.attn_implementation") or "flash_attention_2")
    kind = word if word in ("eager", "sdpa") else "flash"
    reading.set("attention", "ds.attn_implementation", kind, filled="ds.attn_implementation" not in table.data)
    table.leave(("ds.ring_attn_head_stride", "ds.packing_samples"))
    _adapter(reading)
    reading.deepspeed = DeepSpeedPart(_deepspeed(table), f"{table.where}: ds.")
    reading.table.judge("openrlhf")
    return reading.setup("openrlhf")


def _batch(reading: Reading, gpus: int, *, twice: bool, each: int) -> None:
    table = reading.table
    ways = table.count("ds.ring_attn_size") or 1
    note = "ring attention splits a sequence over ranks: a rank's share of its tokens is counted" if ways > 1 else ""
    length = table.count("data.max_len")
    reading.set("seq_len", "data.max_len", -(-(length or 2048) // ways), filled=length is None, note=note)
    size = reading.number("micro_batch", "train.micro_batch_size", default=each, times=2 if twice else 1) or 1
    if table.switch("train.dynamic_batch_enable"):  # trainer/ppo_utils/replay_buffer.py, setup_dynamic_batch
        tokens = (table.count("train.max_tokens_per_gpu") or 16192) * ways
        size = max(1, -(-tokens // (length or 2048)))
        reading.set("micro_batch", "train.max_tokens_per_gpu", size, note=FILLED.format(tokens))
    reading.set_steps("train.batch_size", table.count("train.batch_size") or 128, size * max(1, gpus // ways))


def _adapter(reading: Reading) -> None:
    table = reading.table
    rank, targets = table.count("ds.lora.rank", least=0), table.get("ds.lora.target_modules")
    four = table.switch("ds.load_in_4bit")
    if rank:
        reading.set("lora_rank", "ds.lora.rank", rank)
        reading.set(
            "lora_targets",
            "ds.lora.target_modules",
            ",".join(targets) if isinstance(targets, list) else targets or "all-linear",
        )
        reading.set("lora_dropout", "ds.lora.dropout", str(table.get("ds.lora.dropout") or "0").strip("0.") != "")
        if four:
            reading.set("quantize", "ds.load_in_4bit", "nf4-double")


def _deepspeed(table: Table) -> dict[str, object]:
    """Return the configuration of ``get_train_ds_config``, with DeepSpeed's defaults for values that it leaves at ``auto``."""
    stage = table.count("ds.zero_stage", least=0)
    word = table.text("ds.param_dtype") or "bf16"
    zero: dict[str, object] = {
        "stage": 2 if stage is None else stage,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "cpu" if table.switch("ds.adam_offload") else "none", "pin_memory": True},
        "zero_hpz_partition_size": table.count("ds.zpg") or 1,
    }
    if table.switch("ds.overlap_comm"):
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    return {"zero_optimization": zero, word if word in ("bf16", "fp16") else "bf16": {"enabled": word in ("bf16", "fp16")}}
