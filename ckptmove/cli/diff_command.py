"""``diff``, between its arguments and its report.

Never compares anything itself: the use-case does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove import api
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render import difference, document, github
from ckptmove.cli.streams import Format

if TYPE_CHECKING:
    from ckptmove.cli.streams import Output
    from ckptmove.limits import Limits


def run_diff(first: str, second: str, out: Output, limits: Limits) -> int:
    """Compare two checkpoints and report on it.

    Raises:
        CkptMoveError: as :func:`ckptmove.api.diff`.
    """
    with ProgressBar(wanted=out.is_watched) as progress:
        result = api.diff(first, second, progress=progress, limits=limits)
    code = YES if result.same else NO
    if out.format is Format.JSON:
        out.document(document.diff_document(result, code))
    elif out.format is Format.GITHUB:
        out.lines(github.difference_lines(result))
    elif out.quiet:
        out.lines([difference.brief_line(result)])
    else:
        out.report(difference.difference_lines(out.page, result, verbose=out.verbose))
    return code
