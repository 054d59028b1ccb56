"""Verification of a sharded resume by several processes that torchrun started."""
