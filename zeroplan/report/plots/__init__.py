"""Series drawn on paper: the only place that knows matplotlib. One file per kind, each a function of a figure and a series."""
