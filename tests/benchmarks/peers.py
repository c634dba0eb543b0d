"""Ask one calculator for the memory of one job, in its own process: ``python tests/benchmarks/peers.py NAME``.

The job is Llama 2 7B on 8 GPUs under FSDP2, stage 3, bf16 mixed precision, AdamW, one sequence of 4,096 tokens, no recomputation.
The script prints one line of JSON: the answer [bytes], and the time of the answer without imports [s]. The reference is the
engine's own peak, from the record that the validation page also shows.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

GIB = 2**30
PARAMETERS, LARGEST_LAYER = 6_738_415_616, 32_000 * 4096
GPUS, TOKENS = 8, 4096
RECORDS = Path(__file__).parents[1] / "measured" / "peers.jsonl"
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip

Answer = Callable[[], float]


def zeroplan_estimate() -> Answer:
    """Return zeroplan's estimate of the peak; its time includes building the job."""
    from zeroplan import estimate, job

    return lambda: (
        estimate(
            job(model="llama-2-7b", gpus=GPUS, stage=3, engine="fsdp2", seq_len=TOKENS, optimizer_impl="forloop")
        ).peak_bytes
    )


def zeroplan_verify() -> Answer:
    """Return the peak that zeroplan measures when it runs the engine on fake tensors."""
    from zeroplan import job
    from zeroplan.verify.backends.simulate import simulate

    ready = job(model="llama-2-7b", gpus=GPUS, stage=3, engine="fsdp2", seq_len=TOKENS, optimizer_impl="forloop")
    return lambda: simulate(ready, rank=0, steps=2).steady.peak.peak_bytes


def deepspeed_zero3() -> Answer:
    """Return DeepSpeed's estimate of the model states under stage 3."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    def answer() -> float:
        _, on_gpu, _ = estimate_zero3_model_states_mem_needs(
            PARAMETERS, LARGEST_LAYER, num_gpus_per_node=GPUS, cpu_offload=False, cpu_offload_params=False
        )
        return on_gpu

    return answer


def accelerate_estimate() -> Answer:
    """Return the figure of ``accelerate estimate-memory`` for training with Adam.

    The functions are called directly, because the command contacts the hub even for a model on disk.
    """
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import LlamaConfig, LlamaForCausalLM

    def answer() -> float:
        with init_empty_weights():
            model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        in_fp32, _ = calculate_maximum_sizes(model)
        return max(estimate_training_usage(in_fp32, "bfloat16").values())

    return answer


def llm_analysis() -> Answer:
    """Return llm-analysis's sum of weights, gradients, optimizer state and activations."""
    import logging

    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import (
        ParallelismConfig,
        get_dtype_config_by_name,
        get_gpu_config_by_name,
        get_model_config_by_name,
    )

    logging.disable()

    def answer() -> float:
        said = LLMAnalysis(
            get_model_config_by_name("NousResearch_Llama-2-7b-hf"), get_gpu_config_by_name("a100-sxm-80gb"),
            get_dtype_config_by_name("w16a16e16"), ParallelismConfig(dp_size=GPUS),
        ).training(
            batch_size_per_gpu=1, seq_len=TOKENS, total_num_tokens=10**9, ds_zero=DSZeRO.STAGE_3, mlp_gated_linear_units=True,
            activation_recomputation=ActivationRecomputation.NONE,
        )  # fmt: skip
        return said["(weight+op_state+grad)_memory_per_gpu"] + said["activation_memory_per_gpu"]

    return answer


def fsdp_mem_tracker() -> Answer:
    """Return the peak that torch's FSDP2 memory tracker finds on fake CPU tensors in two steps."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def answer() -> float:
        mesh = dist.init_device_mesh("cpu", (GPUS,))
        with FakeTensorMode():
            model = LlamaForCausalLM(LlamaConfig(**SHAPE, use_cache=False, attn_implementation="sdpa"))
            for layer in (*model.model.layers, model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            tokens = torch.zeros(1, TOKENS, dtype=torch.long)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
            with tracker:
                for _ in range(2):
                    tracker.reset_mod_stats()
                    optimizer.zero_grad()
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
            return float(max(found["Total"] for found in tracker.get_tracker_snapshot("peak").values()))

    return answer


PEERS: dict[str, Callable[[], Answer]] = {
    "zeroplan estimate": zeroplan_estimate,
    "zeroplan verify, simulated": zeroplan_verify,
    "torch's FSDPMemTracker": fsdp_mem_tracker,
    "DeepSpeed's estimate_zero3_model_states_mem_needs": deepspeed_zero3,
    "accelerate's estimate-memory": accelerate_estimate,
    "llm-analysis": llm_analysis,
}


def truth_bytes() -> int:
    """Return the engine's own peak for the job, from the record. [bytes]"""
    from zeroplan.measurement import Measurement
    from zeroplan.spec.base import read

    first = json.loads(RECORDS.read_text(encoding="utf-8").splitlines()[0])
    record: Measurement = read(Measurement, first, where=RECORDS.name)
    return record.steady.peak.peak_bytes


def main() -> None:
    """Print the answer and its time of the calculator that the command line names."""
    answer = PEERS[sys.argv[1]]()
    began = perf_counter()
    n_bytes = answer()
    print(json.dumps({"bytes": n_bytes, "seconds": perf_counter() - began}))


if __name__ == "__main__":
    main()
