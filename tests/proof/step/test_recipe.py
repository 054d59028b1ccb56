"""Errors while an optimizer is built."""

import pytest

from ckptmove.proof.step.recipe import _foreign_errors


def test_no_memory_is_no_error_of_another_library():
    with pytest.raises(MemoryError), _foreign_errors("other.library.Lion"):
        raise MemoryError
