"""A run's folder: what was seen, written so that a kill loses nothing, and read again."""
