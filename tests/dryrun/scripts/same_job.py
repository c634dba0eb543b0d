"""A plain loop with a transformers model; a JSON file sets the model, engine, precision, recomputation, optimizer and batch.

``compiled`` names the parts to compile: ``compiled-blocks``, each by itself, ``compiled-loss``, and ``compiled-model``, as a whole.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

job = json.loads(Path(sys.argv[1]).read_text())
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
torch.cuda.set_device(device)
DTYPES = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "fp32": torch.float32}
mixed = DTYPES[job["precision"]] if job["precision"].endswith("mixed") else None
stored = torch.float32 if mixed and job["engine"] != "deepspeed" else DTYPES[job["precision"]]


def model(where: str) -> torch.nn.Module:
    config = AutoConfig.for_model(**job["config"])
    with torch.device(where):
        made = AutoModelForCausalLM.from_config(config, dtype=stored, attn_implementation="sdpa")
    if job["recompute"] == "full":
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False})
    if job["recompute"] == "selective":
        again = {"context_fn": every_second_product, "preserve_rng_state": False, "early_stop": False}
        made.model.layers = torch.nn.ModuleList(checkpoint_wrapper(block, **again) for block in made.model.layers)
    for block in made.model.layers if "compiled-blocks" in job["compiled"] else ():
        block.compile()
    if "compiled-loss" in job["compiled"]:
        made.loss_function = torch.compile(made.loss_function)
    return made.train()


def every_second_product() -> tuple[object, object]:
    """Keep what torchtitan's checkpoint by operator keeps. Dynamo would not trace a function of zeroplan's."""
    aten, products = torch.ops.aten, {False: 0, True: 0}
    kernels = aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default

    def policy(context, operator, *_: object, **__: object) -> CheckpointPolicy:
        if operator == aten.mm.default:
            products[context.is_recompute] += 1
        keeps = operator in kernels or (operator == aten.mm.default and products[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def optimizer(parameters) -> torch.optim.Optimizer:
    return getattr(torch.optim, job["optimizer"])(parameters, **job["arguments"])


def sharded() -> torch.nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    made = model("meta")
    policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    blocks = made.transformer.h if job["config"]["model_type"] == "gpt2" else made.model.layers
    for block in blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=job["stage"] == 3)
    fully_shard(made, mp_policy=policy, reshard_after_forward=False)
    made.to_empty(device=device)
    return made


def loss_of(trained: torch.nn.Module) -> torch.Tensor:
    output = trained(input_ids=batch, labels=batch)
    return output.loss


def with_torch() -> None:
    several = "WORLD_SIZE" in os.environ
    if several:
        dist.init_process_group("nccl", device_id=device)
    trained = sharded() if job["engine"] == "fsdp2" else model("cuda")
    if several and job["engine"] == "ddp":
        trained = torch.nn.parallel.DistributedDataParallel(trained, device_ids=[device.index])
    if "compiled-model" in job["compiled"]:
        trained = torch.compile(trained)
    steps = optimizer(trained.parameters())
    cast = torch.autocast("cuda", dtype=mixed) if mixed and job["engine"] == "ddp" else nullcontext()
    for _ in range(9):
        for _ in range(job["accumulate"]):
            with cast:
                loss = loss_of(trained)
            loss.backward()
            del loss  # otherwise its four bytes stay alive until the next one
        steps.step()
        steps.zero_grad()


def with_deepspeed() -> None:
    import deepspeed

    made = model("cuda")
    engine, *_ = deepspeed.initialize(model=made, optimizer=optimizer(made.parameters()), config=job["deepspeed"])
    while True:
        loss = loss_of(engine)
        engine.backward(loss)
        del loss
        engine.step()


batch = torch.randint(0, job["config"]["vocab_size"], (job["micro_batch"], job["seq_len"]), device=device)
with_deepspeed() if job["engine"] == "deepspeed" else with_torch()
