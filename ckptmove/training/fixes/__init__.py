"""Fixes of the user's lines: suggested as edits, tried, and written."""
