"""Replace attributes of modules and classes of torch and of Python for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def replaced(owner: Any, **values: object) -> Iterator[None]:
    """Set attributes of a module or a class while the context is open. An inherited one is not its own afterwards."""
    present = vars(owner)
    own = {name: present[name] for name in values if name in present}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
