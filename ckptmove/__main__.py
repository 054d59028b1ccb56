"""``python -m ckptmove``.

Never does anything that the ``ckptmove`` command does not.
"""

from __future__ import annotations

from ckptmove.cli.main import main

if __name__ == "__main__":
    main()
