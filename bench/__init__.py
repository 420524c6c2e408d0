"""Benchmarks against other implementations; each prints a table and writes bench/results."""

import argparse


def described(description: str) -> argparse.ArgumentParser:
    """A parser without arguments, whose --help shows the script's docstring."""
    shape = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=shape)


def between_marks(page: str, name: str, text: str) -> str:
    """A page of Markdown with this text between the comments `name` and `end of name`.

    >>> between_marks("a <!-- x --> old <!-- end of x --> b", "x", "new")
    'a <!-- x -->\\nnew\\n<!-- end of x --> b'
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
