"""Benchmarks against other implementations; each prints a table and writes bench/results."""

import argparse


def described(description: str) -> argparse.ArgumentParser:
    """A parser without arguments, whose --help shows the script's docstring."""
    shape = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=shape)
