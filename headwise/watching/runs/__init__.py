"""The folder of a watched run: written so that a kill loses little, and read again."""
