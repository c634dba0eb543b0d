"""The user's description of a job: frozen dataclasses that check themselves, without formulas. Start at ``job.py``."""
