"""The pytest plugin: ``pytest --ckptmove 'runs/*.pth' --ckptmove-to cuda:0``, and the fixture ``assert_resumes``.

pytest imports this module at every start, so it imports ckptmove only when it is used.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.proof.evidence import Verdict


#: Value of ``--ckptmove`` without a glob.
_CONFIGURED: Final = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("ckptmove", "checkpoints of PyTorch")
    group.addoption(
        "--ckptmove",
        action="append",
        nargs="?",
        const=_CONFIGURED,
        default=[],
        metavar="GLOB",
        help="Run 'ckptmove verify' on these checkpoints, one test each; without GLOB, on those of [tool.ckptmove]. "
        "Repeatable. Other options are those of [tool.ckptmove] and CKPTMOVE_*.",
    )
    group.addoption("--ckptmove-to", metavar="DEV", help="Target device of --ckptmove and of assert_resumes.")


@pytest.hookimpl(tryfirst=True)  # so that -k and -m select these tests, too
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each checkpoint."""
    globs = config.getoption("--ckptmove")
    if globs:
        paths = _checkpoints(globs, config)
        found = [CheckpointItem.from_parent(session, name=path, nodeid=f"ckptmove::{path}") for path in paths]
        items += found
        config.hook.pytest_collectreport(report=pytest.CollectReport("ckptmove", "passed", None, [*found]))


def _checkpoints(globs: list[str], config: pytest.Config) -> tuple[str, ...]:
    """The paths that match the globs, and those of ``[tool.ckptmove]`` if ``--ckptmove`` has no value."""
    from ckptmove.cli.app import verify
    from ckptmove.cli.config import Config, load_config
    from ckptmove.cli.configured import settings_of
    from ckptmove.cli.paths import checkpoint_paths
    from ckptmove.errors import UsageError

    typed = [one for one in globs if one != _CONFIGURED]
    try:
        own = (
            load_config(config.invocation_params.dir, lambda: settings_of(verify)) if _CONFIGURED in globs else Config()
        )
        return checkpoint_paths([*typed, *own.checkpoints], own, "verify")
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


class CheckpointFailed(Exception):
    """The checkpoint does not resume, or cannot be read. The message has the report of ``verify``."""


def _summary(report: str) -> str:
    """The failed checks with their details, or the error: the line that pytest shows at its end."""
    failed = [f"{name}: {detail}" for name, detail in re.findall(r"^(?:✗|FAILED) (\w+) +(.*)", report, re.MULTILINE)]
    errors = [line for line in report.splitlines() if line.startswith("error: ")]
    return "; ".join(failed) or next(iter(errors), "the checkpoint does not resume")


class CheckpointItem(pytest.Item):
    """The test of one checkpoint."""

    def runtest(self) -> None:
        """Verify the checkpoint."""
        from ckptmove.cli.app import app
        from ckptmove.cli.config import ALLOWS_CODE
        from ckptmove.cli.outcome import INTERRUPTED

        to = self.config.getoption("--ckptmove-to")
        report = io.StringIO()
        with pytest.MonkeyPatch.context() as environment:
            # pytest runs code of the project by itself: its conftest.py.
            environment.setenv(ALLOWS_CODE, os.environ.get(ALLOWS_CODE, "1"))
            with redirect_stdout(report), redirect_stderr(report), pytest.raises(SystemExit) as ended:
                app(["verify", self.name, *([f"--to={to}"] if to else [])])
        if ended.value.code == INTERRUPTED:
            raise KeyboardInterrupt
        if ended.value.code:
            text, summary = report.getvalue(), _summary(report.getvalue())
            raise CheckpointFailed(text if text.startswith(summary) else f"{summary}\n\n{text}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report, without a traceback of this module."""
        if isinstance(excinfo.value, CheckpointFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """The checkpoint, as a file without lines."""
        return self.name, None, f"ckptmove verify {self.name}"


@pytest.fixture
def assert_resumes(pytestconfig: pytest.Config) -> Callable[..., Verdict]:
    """:func:`ckptmove.testing.assert_resumes`; its default target is that of ``--ckptmove-to``."""
    from ckptmove import testing

    to = pytestconfig.getoption("--ckptmove-to")
    return partial(testing.assert_resumes, to=to) if to else testing.assert_resumes
