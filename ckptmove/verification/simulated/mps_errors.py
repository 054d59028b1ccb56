"""Errors of the MPS backend on a simulated mps, with torch's messages."""

from __future__ import annotations


class RefusedOnMps(RuntimeError):
    """An operation that the MPS backend refuses.

    Attributes:
        operation: the ATen operation, for example `aten::_linalg_svd.U`.
        node: in a backward that torch computes, the node of the graph; else empty.
        made_by: file and line of each frame that made the node, innermost last, if anomaly detection was on.
    """

    def __init__(self, operation: str, message: str) -> None:
        super().__init__(message)
        self.operation = operation
        self.node = ""
        self.made_by: tuple[tuple[str, int], ...] = ()


class MissingOnMps(RefusedOnMps, NotImplementedError):
    """An operation, or a shape of its operands, that the MPS backend does not implement."""
