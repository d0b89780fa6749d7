"""The command `flashwright` in this process: as fast as a function call, and open to what a test puts in its way."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from flashwright.cli import app as cli


def flashwright(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, error = io.StringIO(), io.StringIO()
    code = 0
    with patch("sys.argv", ["flashwright", *arguments]), redirect_stdout(out), redirect_stderr(error):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    return code, out.getvalue(), error.getvalue()
