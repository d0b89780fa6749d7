"""`python -m flashwright` is the `flashwright` command."""

from flashwright.cli import main

main()
