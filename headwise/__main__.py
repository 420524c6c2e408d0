"""`python -m headwise` is the command `headwise`."""

from headwise.apps.cli.main import main

main()
