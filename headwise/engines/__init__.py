"""The engines, each one way to compute attention; the plan; the cache of prepared calls."""
