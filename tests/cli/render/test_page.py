from __future__ import annotations

import pytest

from ckptmove.cli.render.text import Column, Page, table

COLUMNS = (Column("name", gives_way=True), Column("bytes", right=True), Column("device", style="cyan"))
ROWS = [("model.encoder.layers.0.self_attn.weight", "12 KiB", "cuda:0"), ("b", "3 B", "cpu")]


def test_nothing_is_cut_where_there_is_no_terminal() -> None:
    assert list(table(Page(), COLUMNS, ROWS)) == [
        "name                                      bytes  device",
        "model.encoder.layers.0.self_attn.weight  12 KiB  cuda:0",
        "b                                           3 B  cpu",
    ]


def test_names_give_way_on_a_narrow_terminal() -> None:
    assert list(table(Page(columns=40), COLUMNS, ROWS)) == [
        "name                       bytes  device",
        "model.encode…attn.weight  12 KiB  cuda:0",
        "b                            3 B  cpu",
    ]


def test_names_keep_what_tells_them_apart() -> None:
    rows = [(f"model.encoder.layers.{layer}.self_attn.weight", "12 KiB", "cuda:0") for layer in range(2)]
    assert list(table(Page(columns=40), COLUMNS, rows))[1:] == [
        "mod…s.0.self_attn.weight  12 KiB  cuda:0",
        "mod…s.1.self_attn.weight  12 KiB  cuda:0",
    ]


def test_paths_keep_their_folders_and_their_names() -> None:
    paths = [f"{run}/checkpoint-{step}/model.safetensors" for run in ("alpha", "beta") for step in (5, 10)]
    lines = list(table(Page(columns=42), COLUMNS, [(path, "12 KiB", "cpu") for path in paths]))
    assert len({*lines[1:]}) == 4
    assert all(len(line) <= 42 for line in lines)


def test_many_names_that_could_not_be_told_apart_do_not_give_way() -> None:
    rows = [(f"model.encoder.layers.{layer}.self_attn.projection.weight", "12", "cpu") for layer in range(101)]
    assert list(table(Page(columns=40), COLUMNS, rows)) == list(table(Page(), COLUMNS, rows))


@pytest.mark.parametrize("columns", [80, 200])
def test_a_wide_terminal_changes_nothing(columns) -> None:
    assert list(table(Page(columns=columns), COLUMNS, ROWS)) == list(table(Page(), COLUMNS, ROWS))


def test_a_name_keeps_some_columns_whatever_the_terminal() -> None:
    lines = list(table(Page(columns=5), COLUMNS, ROWS))
    assert lines[1] == "model.…eight  12 KiB  cuda:0"


def test_color_does_not_move_the_columns() -> None:
    colored = list(table(Page(color=True), COLUMNS, ROWS))
    assert colored[2].endswith("\x1b[36mcpu\x1b[0m")
    for code in ("\x1b[36m", "\x1b[1m", "\x1b[0m"):
        colored = [line.replace(code, "") for line in colored]
    assert [line.rstrip() for line in colored] == list(table(Page(), COLUMNS, ROWS))


def test_a_table_without_rows_has_its_heading() -> None:
    assert list(table(Page(), COLUMNS, [])) == ["name  bytes  device"]


def test_paragraphs_hang_and_commands_stay_whole() -> None:
    text = "error D101: tensors lie on two devices, see ckptmove-convert-this-very-long-word-that-does-not-fit-anywhere"
    assert Page(columns=30).wrap(text, 4) == [
        "error D101: tensors lie on two",
        "    devices, see",
        "    ckptmove-convert-this-very-long-word-that-does-not-fit-anywhere",
    ]
    assert Page().wrap(text, 4) == [text]


def test_cut_only_on_a_terminal() -> None:
    assert Page().cut("a" * 100, 4) == "a" * 100
    assert Page(columns=20).cut("a" * 50 + "b" * 50, 4) == "aaaaaaaa…bbbbbbb"


def test_signs_and_words() -> None:
    assert [Page().mark(status) for status in ("passed", "failed", "skipped")] == ["✓", "✗", "\N{EN DASH}"]
    assert [Page(unicode=False).mark(status) for status in ("passed", "failed", "skipped")] == ["ok", "FAILED", "-"]


def test_styles() -> None:
    assert Page(color=True).paint("x", "bold red") == "\x1b[1;31mx\x1b[0m"
    assert Page(color=True).paint("x", "") == "x"
    assert Page(color=False).paint("x", "bold red") == "x"
