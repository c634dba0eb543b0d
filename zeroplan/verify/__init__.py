"""The oracle: the engines' own code, run and watched. The only package that may import torch, transformers and DeepSpeed."""
