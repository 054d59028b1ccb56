"""Bytes in and out: sources, sinks, segments, journals. Knows no format."""
