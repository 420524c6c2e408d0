"""The ways to compute attention. Each engine is a module with `refuses`, `attend` and `run`."""
