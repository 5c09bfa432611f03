"""Studies that take longer than tests may; their results are kept in `results/` with commit, seed and machine."""
