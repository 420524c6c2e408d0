"""`python -m headwise` is the command `headwise`."""

from headwise.cli.main import main

main()
