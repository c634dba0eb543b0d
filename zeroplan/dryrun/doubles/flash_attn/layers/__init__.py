"""Layers of flash-attn that libraries import."""
