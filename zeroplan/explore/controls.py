"""The controls of the page, each with its choices or its range, by the name of its flag."""

from dataclasses import dataclass
from typing import Literal, get_args

from zeroplan.catalog.gpu import gpu_names
from zeroplan.catalog.model import model_names
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.spec.recipe import Attention, Loss, Optimizer, OptimizerImpl, Precision, Recompute

Kind = Literal["choice", "number", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One control: the flag's name, its label, its choices, or its range in doublings."""

    name: str
    label: str
    group: str
    kind: Kind = "choice"
    choices: tuple[str, ...] = ()
    least: int = 1
    most: int = 1
    default: str = ""
    empty: str = "default"
    """The label of no choice."""
    hint: str = ""


#: The flag's values, with the request's value for each.
KEEP_LOGITS: dict[str, bool | Literal["fp32"]] = {"no": False, "yes": True, "fp32": "fp32"}
_WHAT, _WHERE, _SPLIT, _HOW, _FED = "Model", "GPUs", "Split of the model", "Recipe", "Batch"
_AUTO = ""
"""The command line's default, for no choice."""


def controls() -> tuple[Control, ...]:
    """Return every control, in the order of the page."""
    return (
        Control(name="model", label="Model", group=_WHAT, kind="text", choices=tuple(model_names()), default="llama-3.1-8b"),
        Control(name="lora_rank", label="LoRA rank", group=_WHAT, choices=(_AUTO, "4", "8", "16", "32", "64", "128", "256"),
                empty="none: train everything"),
        Control(name="quantize", label="Frozen weights (QLoRA)", group=_WHAT, choices=(_AUTO, "nf4", "nf4-double"),
                empty="not quantised", hint="in 4 bits, beside a LoRA rank"),
        Control(name="gpu", label="GPU", group=_WHERE, choices=(_AUTO, *gpu_names()), default="h100-sxm-80gb",
                empty="any"),
        Control(name="gpus", label="GPUs", group=_WHERE, kind="number", least=1, most=4096, default="8"),
        Control(name="replicas", label="Replicas", group=_WHERE, kind="number", least=1, most=512, default="1",
                hint="copies of the sharded group (HSDP)"),
        Control(name="stage", label="ZeRO stage", group=_HOW, choices=("0", "1", "2", "3"), default="3"),
        Control(name="engine", label="Engine", group=_HOW, choices=(_AUTO, *ENGINE_STAGES)),
        Control(name="precision", label="Precision", group=_HOW, choices=get_args(Precision), default="bf16-mixed"),
        Control(name="recompute", label="Recomputation", group=_HOW, choices=get_args(Recompute), default="none"),
        Control(name="optimizer", label="Optimizer", group=_HOW, choices=get_args(Optimizer), default="adamw"),
        Control(name="optimizer_impl", label="Optimizer step", group=_HOW, choices=(_AUTO, *get_args(OptimizerImpl))),
        Control(name="offload_optimizer", label="Offload optimizer", group=_HOW, choices=("none", "cpu"), default="none"),
        Control(name="offload_param", label="Offload parameters", group=_HOW, choices=("none", "cpu"), default="none"),
        Control(name="attention", label="Attention", group=_HOW, choices=get_args(Attention), default="sdpa"),
        Control(name="loss", label="Loss", group=_HOW, choices=get_args(Loss), default="full"),
        Control(name="keep_logits", label="Logits in backward", group=_HOW, choices=tuple(KEEP_LOGITS), default="no",
                hint="whether the training loop keeps the model's output"),
        Control(name="set", label="Options of the engine", group=_HOW, kind="text",
                hint="for example fsdp2.reshard_after_forward=8; separate several by spaces"),
        Control(name="seq_len", label="Tokens per sequence", group=_FED, kind="number", least=128, most=1_048_576, default="4096"),
        Control(name="micro_batch", label="Sequences per micro-batch", group=_FED, kind="number", least=1, most=256, default="1"),
        Control(name="grad_accum", label="Micro-batches per step", group=_FED, kind="number", least=1, most=256, default="1"),
        *(Control(name=f"{what}_parallel", label=f"{what.capitalize()} parallelism", group=_SPLIT, kind="number", least=1, most=64,
                  default="1") for what in ("tensor", "context", "pipeline", "expert")),
    )  # fmt: skip
