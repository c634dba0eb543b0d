"""The model and the data that several scripts share: a Llama of the size that the command line gives, and random tokens."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--vocab", type=int, default=32000)
parser.add_argument("--seq", type=int, default=256)


def config(size: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.hidden * 43 // 16, num_hidden_layers=size.layers, vocab_size=size.vocab,
        num_attention_heads=size.hidden // 64, num_key_value_heads=size.hidden // 64, tie_word_embeddings=False,
    )  # fmt: skip


def model(size: argparse.Namespace) -> LlamaForCausalLM:
    return LlamaForCausalLM(config(size))


class Tokens(torch.utils.data.Dataset):
    """A data set of random tokens, in the form that a language model's trainer needs."""

    def __init__(self, size: argparse.Namespace) -> None:
        self.rows = torch.randint(0, size.vocab, (256, size.seq), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)}
