"""Bytes in and bytes out: sources to read from, sinks to write to."""
