"""Computes the numbers of a picture; ``plots``, ``bars`` and the browser's page all draw them."""
