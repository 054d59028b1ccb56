"""The command line: the only home of Typer, of exit codes and of hints."""
