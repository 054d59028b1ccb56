"""Questions about paths."""

from __future__ import annotations

import os

from ckptmove.io.locations import other_names


def test_the_hard_links_of_a_file_are_counted(tmp_path):
    path = tmp_path / "a.pth"
    assert other_names(str(path)) == 0
    path.write_bytes(b"")
    assert other_names(str(path)) == 0
    os.link(path, tmp_path / "b.pth")
    assert other_names(str(path)) == 1
