"""The ``diff`` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.api import functions as api
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.renderer import Summary

if TYPE_CHECKING:
    from ckptmove.cli.render.renderer import Renderer
    from ckptmove.limits import Limits


def run_diff(first: str, second: str, renderer: Renderer, limits: Limits) -> int:
    """Compare two checkpoints, write the differences, and return the exit code."""
    with ProgressBar(wanted=renderer.shows_progress) as progress:
        result = api.diff(first, second, progress=progress, limits=limits)
    renderer.diff(result)
    return renderer.finish(Summary("diff", YES if result.same else NO))
