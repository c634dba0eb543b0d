"""Draws series with matplotlib, which only this package imports. Each file draws one kind of series into a figure."""
