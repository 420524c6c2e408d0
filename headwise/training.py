"""An alias of `headwise.apps.train`, where training moved; it goes with the next release."""

from importlib import import_module

_moved = import_module("headwise.apps.train")  # looked up: the library imports no application

__all__ = list(_moved.__all__)
globals().update({name: getattr(_moved, name) for name in __all__})
