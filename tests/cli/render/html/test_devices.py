from __future__ import annotations

from ckptmove.cli.render.html.devices import Palette


def test_a_device_keeps_its_color_in_the_whole_page() -> None:
    palette = Palette()
    first = palette.slot("cuda:1")
    assert palette.ordered(["mps", "cuda:10", "cuda:1", "cpu", "cuda:2", "unknown", "cuda:1"]) == [
        "cpu", "cuda:1", "cuda:2", "cuda:10", "mps", "unknown",
    ]  # fmt: skip
    assert palette.slot("cuda:1") == first
    assert len({palette.slot(one) for one in ("cpu", "cuda:1", "cuda:2", "cuda:10", "mps", "unknown")}) == 6
    assert palette.slot("unknown") == palette.slot("meta")


def test_colors_repeat_when_they_run_out() -> None:
    palette = Palette()
    slots = [palette.slot(f"cuda:{index}") for index in range(100)]
    assert len(set(slots)) == 8
    assert slots[:8] == slots[8:16]


def test_a_label_is_text() -> None:
    assert "<b>" not in Palette().label("<b>")
