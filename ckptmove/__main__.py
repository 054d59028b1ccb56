"""Run the command line with ``python -m ckptmove``."""

import sys

if __name__ == "__main__":
    # ``-m`` puts the current folder first on the path, which may hold a typer.py beside a downloaded checkpoint. A
    # module that was not found through it, as in a zip of an application, has a ``__spec__`` without this package.
    if not getattr(sys.flags, "safe_path", False) and __package__:  # Python 3.10 has no -P
        del sys.path[0]
    from ckptmove.cli.main import main

    main()
