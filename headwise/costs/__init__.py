"""The cost of attention before it runs: parameters, FLOPs, bytes and time."""
