"""Runs training: models, ways of splitting them, and the engines."""
