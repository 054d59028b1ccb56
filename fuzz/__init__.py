"""Fuzzers: a target for each container, for archives, for directories and for the pickle machine, over one harness.

Never part of the package, and never needed by the tests but for the harness, which replays what fuzzers have found.
"""
