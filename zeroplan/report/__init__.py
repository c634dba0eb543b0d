"""Renders results as text, Markdown, JSON and pictures; the command line prints them."""
