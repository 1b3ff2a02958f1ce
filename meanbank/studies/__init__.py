"""Studies: runs and evaluations put together."""
