"""Corpora, tokenisers and batches."""
