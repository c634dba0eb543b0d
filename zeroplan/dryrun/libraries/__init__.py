"""Replaces library code that needs a GPU, one file per library; the report lists the replacements that a script used."""
