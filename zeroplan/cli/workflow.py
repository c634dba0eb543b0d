"""``zeroplan workflow``: how much GPU memory does each phase of a fine-tuning loop need, and which one needs most?"""

from functools import partial
from typing import Annotated, Any, cast

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.flags import AsJson, flag, switch
from zeroplan.cli.job_flags import takes_a_job
from zeroplan.errors import SpecError
from zeroplan.resolve import Resolved
from zeroplan.units import parse_count

_LOOP, _HOST = "Workflow", "Loading and saving"
_SERVERS = ("colocate", "server")


_word, _switch = partial(flag, "", panel=_LOOP), partial(switch, panel=_LOOP)


@takes_a_job
def workflow_command(
    *,
    name: Annotated[str, typer.Argument(metavar="WORKFLOW", help="sft, dpo, kto or grpo, as in TRL.", show_default=False)],
    resolved: Resolved,
    precompute_ref_log_probs: Annotated[
        bool, _switch("--precompute-ref-log-probs", "DPO, KTO: score the data before training, without a reference model then.")
    ] = False,
    beta: Annotated[str | None, _word("B", "GRPO: weight of the KL term; above 0 a reference model is there. (default: 0)")] = None,
    max_completion_length: Annotated[
        str | None, _word("N", "Tokens of --seq-len that are scored; the rest is the prompt. (default: all but one, GRPO: 512)")
    ] = None,
    num_generations: Annotated[str | None, _word("N", "GRPO: completions of a prompt. (default: 8)")] = None,
    steps_per_generation: Annotated[
        str | None, _word("N", "GRPO: micro-batches of one rollout. (default: as many as are accumulated)")
    ] = None,
    vllm_mode: Annotated[str | None, _word("NAME", "GRPO: colocate (on the training GPUs) or server. (default: colocate)")] = None,
    vllm_gpu_memory_utilization: Annotated[
        str | None, _word("X", "GRPO: vLLM's share of a training GPU's memory. (default: 0.3)")
    ] = None,
    vllm_tensor_parallel_size: Annotated[str | None, _word("N", "GRPO: GPUs that share vLLM's weights. (default: 1)")] = None,
    vllm_enable_sleep_mode: Annotated[
        bool, _switch("--vllm-enable-sleep-mode", "GRPO: vLLM sleeps while the model trains.")
    ] = False,
    vllm_sleep_level: Annotated[
        str | None, _word("N", "GRPO: 2, as TRL sleeps (weights are dropped), or 1 (they go to the host). (default: 2)")
    ] = None,
    cpu_ram_efficient_loading: Annotated[
        bool, _switch("--fsdp-cpu-ram-efficient-loading", "One process of a node loads the weights for all of it.", panel=_HOST)
    ] = False,
    full_state_dict: Annotated[
        bool, _switch("--full-state-dict", "A checkpoint is one full state dict, gathered, rather than shards.", panel=_HOST)
    ] = False,
    explain: Annotated[bool, switch("--explain", "Every line with its source.")] = False,
    as_json: AsJson = False,
    check: Annotated[bool, switch("--check", "Exit with 1 if a phase does not fit its GPU.")] = False,
) -> int:  # fmt: skip
    """The phases of a fine-tuning loop that share a GPU: loading, scoring, rollouts, training, saving. Words are TRL's."""
    from zeroplan.workflow import Asked, loop_of  # noqa: PLC0415  only this command pays for it

    if vllm_mode is not None and vllm_mode not in _SERVERS:
        raise SpecError(f"--vllm-mode {vllm_mode!r} is none of {', '.join(_SERVERS)}")
    asked = Asked(
        workflow=cast("Any", name),
        precompute_ref_log_probs=precompute_ref_log_probs or None,
        beta=_number("--beta", beta),
        max_completion_length=_count("--max-completion-length", max_completion_length),
        num_generations=_count("--num-generations", num_generations),
        steps_per_generation=_count("--steps-per-generation", steps_per_generation),
        vllm_mode=cast("Any", vllm_mode),
        vllm_gpu_memory_utilization=_number("--vllm-gpu-memory-utilization", vllm_gpu_memory_utilization),
        vllm_tensor_parallel_size=_count("--vllm-tensor-parallel-size", vllm_tensor_parallel_size),
        vllm_enable_sleep_mode=vllm_enable_sleep_mode or None,
        vllm_sleep_level=_count("--vllm-sleep-level", vllm_sleep_level),
        cpu_ram_efficient_loading=cpu_ram_efficient_loading or None,
        full_state_dict=full_state_dict or None,
    )
    if check and resolved.job.cluster.gpu is None:
        raise SpecError("--check asks whether the phases fit, but no GPU is named; add --gpu NAME (`zeroplan gpus` lists them)")
    loop = loop_of(resolved.job, asked)
    _show(loop, resolved.notes, explain=explain, as_json=as_json)
    return NO if check and loop.verdict == "does not fit" else 0


def _show(loop: Any, notes: tuple[str, ...], *, explain: bool, as_json: bool) -> None:  # noqa: ANN401  a Loop, late
    from zeroplan.report.workflow import loop_payload, loop_text  # noqa: PLC0415  only the rendering asked for is loaded

    if as_json:
        typer.echo(json_text(loop_payload(loop, notes)))
        return
    from zeroplan.cli.terminal import show  # noqa: PLC0415  only the rendering asked for is loaded

    show(loop_text(loop, notes, explain=explain))


def _count(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_count(text, what=flag, examples="8 or 1024")


def _number(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if number != number or number in (float("inf"), float("-inf")):  # noqa: PLR0124  only nan differs from itself
        raise SpecError(f"{flag} {text!r} is no number; write one as 0.3")
    return number
