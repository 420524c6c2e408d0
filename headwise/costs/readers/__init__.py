"""Readers: from a module or a configuration to the architecture that is counted."""
