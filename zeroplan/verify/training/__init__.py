"""Builds models, wraps them in the engines, and runs training steps; begin at ``run.py``."""
