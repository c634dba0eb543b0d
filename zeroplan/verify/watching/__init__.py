"""Records what a run requests: every allocation and every collective, with its purpose, and the totals."""
