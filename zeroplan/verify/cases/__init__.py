"""Runs many cases one after the other, records their results, and compares them with the estimates."""
