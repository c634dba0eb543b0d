"""Which allocations and collectives does a run make? Records each with its purpose, and the totals."""
