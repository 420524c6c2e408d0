"""Builds the documentation site out of docs/, the docstrings and the recorded results.

    make docs        # or: python -m website

English is the site itself, 中文 its folder zh. `contents` finds the pages, `staging` copies them
with their links rewritten, `reference`, `results` and `notebook_pages` write the generated ones,
Sphinx builds both languages, and `checking` follows every link.
"""
