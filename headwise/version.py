"""The version, where every module can import it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
"""The version of this installation."""
