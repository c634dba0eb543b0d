"""The memory and FLOPs of a model before any sharding: parameters, activations, head and loss. Start with ``blocks.py``."""
