"""Costs by tracing: a model runs on the meta device, and what PyTorch does is counted."""
