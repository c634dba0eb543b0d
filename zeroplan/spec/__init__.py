"""Descriptions of a job by the user: frozen, strictly checked, without formulas."""
