"""Profiles a script's own model: reruns its forward and loss with other batches and lengths, without its engine."""
