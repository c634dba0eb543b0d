"""Replacements in libraries for code that needs a GPU, one file per library; the report lists those that were used."""
