"""`python -m flashwright` is the `flashwright` command."""

from flashwright.cli.app import main

main()
