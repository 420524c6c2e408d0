"""Side by side with peers. Each script prints a table and writes its figures to bench/results."""

import argparse


def described(said: str) -> argparse.ArgumentParser:
    """A script's arguments, none as yet; its --help says what the script's docstring does."""
    shape = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=said, formatter_class=shape)
