"""Data, tokenisers, the loop and the presets: how the built-in models were made."""
