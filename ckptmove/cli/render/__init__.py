"""Reports: human, JSON, GitHub annotations, and files of `--report`."""
