"""The script behind ``trl.json``: a trainer of TRL's own on a small Llama, for ``zeroplan dryrun -- [accelerate launch] FILE``.

The Triton kernels that fold a tile of logits write into tensors that are there already, so they do nothing here. The rows are the
second step's peaks of forward and backward, and the peak of loading. accelerate's files set ``mixed_precision: bf16`` and FSDP with
LlamaDecoderLayer as the class to wrap, or DeepSpeed's stage. Without a launcher it is one GPU.
"""

import argparse


def select(count: int) -> None:
    """Let a mask select so many tokens of each sequence: GRPO's is unknown in a dry run, where it would select all."""
    import torch

    class Selected(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given, mask):
            ctx.save_for_backward(mask)
            ctx.shape = given.shape
            return given.new_empty(mask.shape[0] * count, *given.shape[2:])

        @staticmethod
        def backward(ctx, gradient):
            return gradient.new_zeros(ctx.shape), None

    class Scattered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given, mask, source):
            ctx.save_for_backward(mask)
            ctx.length = len(source)
            return given.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None, None, gradient.new_empty(ctx.length)

    indexed = torch.Tensor.__getitem__

    def item(given, index):
        is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.dim() == 2
        return Selected.apply(given, index) if is_mask else indexed(given, index)

    def scattered(given, mask, source):
        return Scattered.apply(given, mask, source)

    torch.Tensor.__getitem__, torch.Tensor.masked_scatter = item, scattered


def run_kernels_of_pairs() -> None:
    """Let TRL's fused log-probabilities allocate as on a GPU: its Triton kernels write into tensors that are there already."""
    import sys
    from types import ModuleType

    import trl.trainer.utils as scoring

    stub, language = ModuleType("triton"), ModuleType("triton.language")
    stub.jit = lambda _: type("Nothing", (), {"__getitem__": lambda *_: lambda *_, **__: None})()
    stub.cdiv, stub.language, language.constexpr = (lambda a, b: -(-a // b)), language, int
    sys.modules |= {"triton": stub, "triton.language": language}
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy

    del sys.modules["triton"], sys.modules["triton.language"]
    scoring._fused_logprob_entropy, scoring.is_triton_available = selective_log_softmax_and_entropy, lambda: True
    scoring._supports_trl_loss_kernel = lambda *_: True


def main() -> None:
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
    from trl.kernels import chunked_divergence, chunked_logprob

    said = argparse.ArgumentParser()
    said.add_argument("--workflow", choices=("sft", "dpo", "kto", "orpo", "reward", "distill", "grpo"), default="dpo")
    said.add_argument("--dtype", default="float32")
    said.add_argument("--precompute", action="store_true")
    for name, number in {
        "batch": 2,
        "seq": 1024,
        "hidden": 1024,
        "layers": 6,
        "vocab": 32000,
        "tie": 0,
        "lora": 0,
        "prompt": 1,
    }.items():
        said.add_argument(f"--{name}", type=int, default=number)
    said = said.parse_args()

    for kernels, folds in ((chunked_logprob, "forward backward"), (chunked_divergence, "stats jsd backward")):
        for fold in folds.split():
            setattr(kernels, f"_{fold}_tile", lambda *_, **__: None)
    chunked_logprob._use_triton = chunked_divergence._use_triton = lambda _: False
    for scoring in (trl.trainer.utils, trl.trainer.distillation_trainer):
        scoring._use_triton = lambda _: True  # only tokens that count are scored, as on a GPU

    tokens = {"pad_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    words = Tokenizer(WordLevel({f"w{at}": at for at in range(said.vocab)}, unk_token=tokens["unk_token"]))
    words.pre_tokenizer = Whitespace()
    config = LlamaConfig(
        hidden_size=said.hidden, intermediate_size=3 * said.hidden, num_hidden_layers=said.layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=said.vocab, tie_word_embeddings=bool(said.tie),
    )  # fmt: skip
    config.num_labels, config.pad_token_id = 1, 1
    kind = LlamaForSequenceClassification if said.workflow == "reward" else LlamaForCausalLM
    model, *reference = (
        kind._from_config(config, dtype=getattr(torch, said.dtype))
        for _ in range(1 if said.workflow in ("sft", "orpo", "reward") or said.precompute or said.lora else 2)
    )
    long = said.seq - said.prompt
    if said.workflow == "grpo":
        select(long)
    text = " " + " ".join(f"w{3 + at}" for at in range(long))
    row = {
        "dpo": {"chosen": text, "rejected": text}, "orpo": {"chosen": text, "rejected": text},
        "kto": {"completion": text, "label": True}, "sft": {"completion": text},
        "reward": {"chosen_ids": [4] * said.seq, "rejected_ids": [4] * said.seq},
        "distill": {}, "grpo": {},
    }  # fmt: skip
    data = Dataset.from_list([{"prompt": " ".join(["w3"] * said.prompt), **row[said.workflow]}] * 64)
    name = {"reward": "Reward", "distill": "Distillation"}.get(said.workflow, said.workflow.upper())
    options, given = {"max_length": said.seq}, {"ref_model": reference[0]} if reference else {}
    if said.precompute:
        options["precompute_ref_log_probs"] = True
    if said.workflow == "distill":
        options, given = {"max_completion_length": long}, {"teacher_model": reference[0]}
        trl.DistillationTrainer._generate = lambda _, prompts: (
            [[3] * said.prompt for _ in prompts], [[4] * (long - 1) + [2] for _ in prompts], None, None, [],
        )  # fmt: skip
    if said.workflow == "grpo":  # completions come from a function, in place of vLLM
        options = {"beta": 0.04, "num_generations": said.batch, "max_completion_length": long, "num_iterations": 2}
        trl.trainer.grpo_trainer.create_model_from_path = lambda *_, **__: reference[0]
        given = {
            "reward_funcs": lambda completions, **_: [float(at) for at in range(len(completions))],
            "rollout_func": lambda prompts, _: {
                "prompt_ids": [[3] * said.prompt for _ in prompts], "completion_ids": [[4] * (long - 1) + [2] for _ in prompts],
                "logprobs": [[0.0] * long for _ in prompts],
            },
        }  # fmt: skip
    if said.workflow == "orpo":
        import trl.experimental.orpo as trl

        run_kernels_of_pairs()
    arguments = getattr(trl, f"{name}Config")(
        "out", per_device_train_batch_size=said.batch, bf16=True, report_to=[], save_strategy="no", max_steps=4,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, **options,
    )  # fmt: skip
    getattr(trl, f"{name}Trainer")(
        model, args=arguments, train_dataset=data,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **tokens),
        peft_config=LoraConfig(r=said.lora, target_modules="all-linear", task_type="CAUSAL_LM") if said.lora else None,
        **given,
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
