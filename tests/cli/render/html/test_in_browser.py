"""The pages as headless Chromium shows them. The fixture fails on any message of the console and any request."""

from __future__ import annotations

import pytest

from ckptmove.cli.render.html.document import HtmlDocument
from ckptmove.cli.render.renderer import Summary
from ckptmove.cli.render.text import clean
from ckptmove.comparison.differences import Change, Differences

HOSTILE = (
    "</script><script>window.owned = 1</script>", "</SCRIPT >", "<!--<script>", "]]>", "&lt;b&gt;",
    "<img src=x onerror=window.owned=1>", "\"' onmouseover=window.owned=1 x='", "javascript:owned",
    "__proto__", "constructor.prototype", "toString", "a\u202egnp.exe", "\u2066\u200f\ufeff", "\udc80\ud800",
    "a\nb\r\0c", "\u2028", ".", "..", "", "x" * 10_000, "a." * 400 + "b",
)  # fmt: skip
#: The text of the first cell of each row that is drawn.
ROWS = """[...document.querySelectorAll('.table tbody tr:not(.spacer) td:first-child')]
    .map((cell) => (cell.querySelector('bdi') ?? cell).textContent)"""
SEARCH = "document.querySelector('.table input')"
TIP = "document.querySelector('.tip').innerText.replaceAll('\\n\\n', '\\n')"


def tensors(count):
    for number in range(count // 4):
        name = f"model.layers.{number}.weight"
        yield name, "model", "cuda:0", 64, None
        for key in ("step", "exp_avg", "exp_avg_sq"):
            yield f"optimizer.state.{number}.{key}", "optimizer", "cuda:1", 1 if key == "step" else 64, name


def search(browser, words):
    browser.run(f"{SEARCH}.focus(); {SEARCH}.select()")
    browser.type(words)
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return browser.run(ROWS)


@pytest.mark.slow
@pytest.mark.unmeasured
def test_hostile_text_stays_text(browser, entry, page_of, finding) -> None:
    rows = [(name, "model", "cpu", 1, None) for name in dict.fromkeys(HOSTILE)]
    hostile = [
        entry(
            [(name, role, text, size, parameter) for name, role, _, size, parameter in rows],
            path=text, torch_version=text, producer=text,
            mentions=[{"where": text, "kind": "string", "value": text}],
            globals=[
                {"name": text, "weights_only": False, "weights_only_since": None, "verdict": "unknown", "record": text}
            ],
            findings=[finding(where=[text], fix=text, message=text)],
        )
        for text in HOSTILE
    ]  # fmt: skip
    shown = browser(page_of(*hostile), height=1500)
    shown.run("document.querySelectorAll('section').forEach(drawSection)")
    assert shown.run("document.querySelectorAll('.table tbody tr:not(.spacer)').length") == len(HOSTILE) ** 2
    assert shown.run("window.owned") is None
    assert shown.run("document.querySelectorAll('img, script:not([type]) ~ :not(script)').length") == 0
    assert shown.run("document.scripts.length") == len(HOSTILE) + 2
    expected = [clean(name) or "(root)" for name, *_ in rows]
    assert shown.run(f"{ROWS}").count(expected[0]) == len(HOSTILE)
    assert sorted(set(shown.run(ROWS))) == sorted(expected)
    assert shown.run("[...document.querySelectorAll('h2')].map((one) => one.textContent)") == [*map(clean, HOSTILE)]
    assert shown.run("document.documentElement.scrollWidth") == 1400


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_table_of_many_rows_is_searched_sorted_and_scrolled(browser, entry, page_of) -> None:
    shown = browser(page_of(entry([*tensors(100_000)])))
    assert shown.run("document.querySelectorAll('.table tr').length") < 100
    assert shown.run("document.querySelector('.table table').getAttribute('aria-rowcount')") == "100001"
    shown.run("document.querySelector('.scroll').scrollTop = 1e9")
    shown.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert shown.run(ROWS)[-1] == "optimizer.state.24999.exp_avg_sq"
    assert shown.run("document.querySelector('.table tr:nth-last-child(2)').getAttribute('aria-rowindex')") == "100001"
    assert search(shown, "state.24999 EXP_avg") == ["optimizer.state.24999.exp_avg", "optimizer.state.24999.exp_avg_sq"]
    assert shown.run("document.querySelector('.matches').textContent") == "2 of 100,000"
    assert search(shown, "nothing") == ["Nothing matches."]
    assert len(search(shown, "layers.24999")) == 4  # the state of a parameter is found by its name
    assert shown.run("document.querySelector('.table small:not(:empty)').textContent") == "model.layers.24999.weight"
    assert len(search(shown, "device:cuda:1 24999")) == 3
    assert search(shown, "device:cuda 24999") == ["Nothing matches."]
    search(shown, "24999")
    names = [
        "model.layers.24999.weight",
        *(f"optimizer.state.24999.{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
    ]
    assert shown.run(ROWS) == names
    click = "document.querySelector('.table thead button').click()"
    direction = "document.querySelector('.table th').getAttribute('aria-sort')"
    assert shown.run(f"{click}; {ROWS}") == sorted(names)
    assert shown.run(direction) == "ascending"
    assert shown.run(f"{click}; {ROWS}") == sorted(names, reverse=True)
    assert shown.run(direction) == "descending"
    assert shown.run(f"{click}; {ROWS}") == names
    assert shown.run(direction) is None


def test_a_table_higher_than_an_element_can_be_is_scrolled_to_its_end(browser, entry, page_of) -> None:
    shown = browser(page_of(entry(["a", "b"])))
    shown.run("""
        window.place = document.querySelector('.table');
        place.replaceChildren();
        const values = Array.from({ length: 1_000_000 }, (_, row) => row);
        const column = readColumn({ title: 'bytes', kind: 'numbers', values });
        window.many = new Table(place, { rows: 1_000_000, columns: [column], column: () => undefined });
        many.view.scrollTop = 1e9;
        many.draw();
    """)
    assert shown.run(ROWS)[-1] == "999999"
    shown.run("many.reveal(500_000)")
    assert "500000" in shown.run(ROWS)


def test_the_map_shows_devices_findings_and_the_state_of_each_parameter(browser, entry, page_of, finding) -> None:
    rows = [("model.a.weight", "model", "cuda:0", 1000, None), ("model.b", "model", "cuda:1", 1000, None),
            ("optimizer.state.0.exp_avg", "optimizer", "cuda:1", 1000, "model.a.weight"),
            ("optimizer.state.0.step", "optimizer", "cuda:1", 1, "model.a.weight")]  # fmt: skip
    found = [finding(where=["optimizer.state.0.step"]), finding("D103", "info", ["model.b"])]
    shown = browser(page_of(entry(rows, findings=found)))
    shown.run("document.querySelector('canvas').focus()")
    tips = []
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft"):
        shown.press(key)
        tips.append(shown.run(TIP).split("\n"))
    assert tips[0] == ["model", "4 tensors · 11.7 KiB · cuda:0, cuda:1", "1 tensor with an error or a warning"]
    assert tips[1][:2] == ["model.a.weight", "3 tensors · 7.8 KiB · cuda:0, cuda:1"]
    assert tips[2][:2] == ["model.b", "model · cuda:1 · float32 · [1000] · 3.9 KiB"]
    assert tips[3] == tips[1]
    assert tips[5] == tips[1]
    shown.run("const canvas = document.querySelector('canvas'); window.image = "
              "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height); 0")  # fmt: skip
    x, y, _, height = tile(shown)
    assert pixel(shown, x + 1, y + height / 2) == [0xD0, 0x02, 0x1B]  # --grave
    shown.press("ArrowDown")
    x, y, width, height = tile(shown)
    color = {"weight": [0x00, 0x72, 0xB2], "exp_avg": [0xE6, 0x9F, 0x00]}[
        shown.run(TIP).split("\n")[0].rpartition(".")[2]
    ]
    assert pixel(shown, x + width / 2, y + height - 8) == color


def tile(browser):
    """Left, top, width and height of the selected tile."""
    box = """(() => {
        const [{ x, y, width, height }, frame] =
            ['.cursor', '.frame'].map((one) => document.querySelector(one).getBoundingClientRect());
        return [x - frame.x, y - frame.y, width, height];
    })()"""
    return browser.run(box)


def pixel(browser, x, y):
    return browser.run(f"[...image.data].slice(4 * ({round(y)} * image.width + {round(x)}), "
                       f"4 * ({round(y)} * image.width + {round(x)}) + 3)")  # fmt: skip


def test_a_module_with_one_child_is_joined_with_it(browser, entry, page_of) -> None:
    names = ["a", "x.x", "m.n.o", "m.n.p", "w.weight"]
    rows = [*((name, "model", "cpu", 4, None) for name in names), ("opt.0.avg", "optimizer", "cpu", 3, "w.weight")]
    shown = browser(page_of(entry(rows)))
    tree = """(() => {
        const labels = (node) => (node.children ? [node.label, node.children.map(labels)] : node.label);
        return labels(moduleTree(readTable('section-1-data')));
    })()"""
    assert shown.run(tree) == ["all", [["m.n", ["o", "p"]], ["w.weight", ["weight", "avg"]], "a", "x.x"]]


def test_the_map_opens_modules_and_shows_tensors_in_the_table(browser, entry, page_of) -> None:
    shown = browser(page_of(entry([*tensors(400)])))
    trail = "[...document.querySelectorAll('.trail button')].map((one) => one.textContent)"
    shown.run("document.querySelector('canvas').focus()")
    shown.press("ArrowDown")
    shown.press("Enter")
    assert shown.run(trail) == ["all", "model.layers"]
    shown.press("ArrowDown")
    shown.press("Enter")
    opened = shown.run(trail)
    assert opened[:2] == ["all", "model.layers"]
    assert len(opened) == 3
    shown.press("ArrowDown")
    shown.press("Enter")
    marked = shown.run("document.querySelector('tr.marked bdi').textContent")
    assert opened[2].split(".")[0] in marked.split(".")
    shown.run("document.querySelector('canvas').focus()")
    shown.press("Escape")
    assert shown.run(trail) == ["all", "model.layers"]
    shown.run("document.querySelector('.trail button').click()")
    assert shown.run(trail) == ["all"]
    x, y = shown.run("(() => { const canvas = document.querySelector('canvas'); canvas.scrollIntoView(); "
                     "const box = canvas.getBoundingClientRect(); return [box.x + 20, box.y + 60]; })()")  # fmt: skip
    shown.click(x, y)
    assert shown.run(trail) == ["all", "model.layers"]


def test_buttons_filter_the_table_and_copy_the_fix(browser, entry, page_of, finding) -> None:
    fix = "ckptmove convert 'a  b.pth' --to cuda:0"
    rows = [*tensors(40)]
    shown = browser(page_of(entry(rows, findings=[finding("O201", "warning", [rows[1][0]], fix)])))
    shown.run("[...document.querySelectorAll('.count')].find((one) => one.textContent === '30').click()")
    assert shown.run(f"{SEARCH}.value") == "role:optimizer device:cuda:1"
    assert shown.run("document.querySelector('.matches').textContent") == "30 of 40"
    shown.run("document.querySelector('.finding .link').click()")
    assert shown.run(ROWS) == [rows[1][0]]
    assert shown.run("document.querySelector('td.grave').textContent") == "O201"
    shown.run("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    shown.run("document.querySelector('.copy').click()")
    assert shown.run("window.copied") == fix
    assert shown.run("document.querySelector('.copy').textContent") == "Copied"


def test_a_section_is_drawn_when_it_comes_into_view(browser, entry, page_of) -> None:
    shown = browser(page_of(*(entry([*tensors(40)], path=f"{n}.pth") for n in range(5))))
    drawn = "document.querySelectorAll('.frame canvas').length"
    assert 0 < shown.run(drawn) < 5
    painted = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
    shown.run("document.querySelector('section:last-of-type .count').click()")
    shown.run(painted)
    assert shown.run("document.querySelectorAll('section:last-of-type .frame canvas').length") == 1
    for number in range(1, 6):
        shown.run(f"document.querySelector('#section-{number}').scrollIntoView({{ behavior: 'instant' }})")
        shown.run(painted)
    shown.run(painted)
    assert shown.run(drawn) == 5


def test_the_map_is_drawn_after_the_table(browser, entry, page_of) -> None:
    shown = browser(page_of(entry([*tensors(40)])))
    count = "[sections[0].querySelectorAll('.table table').length, sections[0].querySelectorAll('canvas').length]"
    again = (
        "(() => { drawn.clear(); sections[0].querySelector('.frame').remove(); drawSection(sections[0]); return %s })()"
    )
    assert shown.run(again % count) == [2, 0]
    shown.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert shown.run(count) == [2, 1]


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_a_phone_in_both_color_schemes(browser, say, bench, dark, tmp_path) -> None:
    say("inspect", "dragged.pth", "run.pth", "--report", "html=report.html")
    shown = browser((bench / "report.html").read_text(encoding="utf-8"), width=400, height=800, dark=dark)
    assert shown.run("document.documentElement.scrollWidth") == 400
    background = shown.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(15, 18, 22)") is dark
    assert shown.run(ROWS)[0] == "model.0.weight"
    assert shown.screenshot(tmp_path / "page.png").startswith(b"\x89PNG")


def test_a_difference_is_shown_in_rows(browser) -> None:
    changed = tuple(Change(f"w.{n}", "device", "cpu", "cuda:0", None) for n in range(500))
    document = HtmlDocument()
    document.diff(
        Differences(first="a", second="b", tensors=1, added=("<b>",), removed=(), changed=changed, uncompared=())
    )
    shown = browser(document.document(Summary("diff", 1)), width=400)
    assert shown.run(ROWS)[:2] == ["<b>", "w.0"]
    assert shown.run("document.documentElement.scrollWidth") == 400
    assert search(shown, "what:added") == ["<b>"]
    assert shown.run("drawn.size") == 1
