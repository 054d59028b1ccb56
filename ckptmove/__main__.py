"""Run the command line with ``python -m ckptmove``."""

from __future__ import annotations

from ckptmove.cli.main import main

if __name__ == "__main__":
    main()
