"""Keeps pytest from collecting the scripts, which tests run as dry runs."""

collect_ignore = ["scripts"]
