"""Layouts of sparse tensors."""

from __future__ import annotations

from typing import Final

#: Names of the dense tensors of a sparse tensor, by layout.
SPARSE_PARTS: Final[dict[str, tuple[str, ...]]] = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
