"""The command line: Typer, exit codes, hints and reports."""
