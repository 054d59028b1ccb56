"""Fuzzers for each container, for archives, for directories and for the pickle machine.

They are not part of the package. The tests use the harness, to replay inputs that fuzzers found, and the recipes.
"""
