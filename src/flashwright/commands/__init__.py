"""What each subcommand of `flashwright` takes and prints. The work itself is done by the packages they call."""
