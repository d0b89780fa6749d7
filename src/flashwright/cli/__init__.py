"""The command `flashwright`: one file per subcommand, gathered by `app`."""

from flashwright.cli.app import main

__all__ = ["main"]
