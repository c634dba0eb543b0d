"""Runs the engines' own code and measures its memory. Only this package and ``dryrun`` import torch, transformers and DeepSpeed."""
