from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptmove.cli.render.html as package
from ckptmove.cli.render.html import HEAD
from ckptmove.cli.render.html.page import data_block, whole_page

ASSETS = Path(package.__file__).parent
#: Elements with scripts and style. A browser runs those without a type.
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@pytest.fixture(scope="module")
def page():
    return whole_page("a < b", [])


def test_the_policy_has_the_hash_of_every_script_and_style_and_permits_nothing_else(page) -> None:
    policy = unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1])
    found: dict[str, list[str]] = {"script": [], "style": []}
    for tag, source in INLINE.findall(page):
        found[tag].append(f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'")
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives == {
        "default-src": "'none'",
        "script-src": " ".join(found["script"]),
        "style-src": " ".join(found["style"]),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert {tag: len(hashes) for tag, hashes in found.items()} == {"script": 2, "style": 1}


def test_the_policy_comes_before_what_it_governs(page) -> None:
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script>")


def test_a_page_begins_as_a_report_and_loads_nothing(page) -> None:
    assert page.encode().startswith(HEAD)
    assert "<title>a &lt; b</title>" in page
    own = page.replace((ASSETS / "d3-hierarchy.min.js").read_text(encoding="utf-8"), "")
    assert not re.search(r"https?:|url\(|@import|\bimport\b|\bsrc=|\bfetch\(", own)


@pytest.mark.parametrize(
    "path", [*sorted(ASSETS.glob("*.[jc]s*")), ASSETS / "d3-hierarchy.LICENSE"], ids=lambda p: p.name
)
def test_no_asset_ends_the_element_that_it_is_in(path) -> None:
    source = path.read_text(encoding="utf-8").lower()
    assert not any(end in source for end in ("</script", "</style", "<!--"))
    assert path.suffix != ".LICENSE" or "*/" not in source


def test_the_library_is_the_one_that_is_named_with_its_license(page) -> None:
    library = (ASSETS / "d3-hierarchy.min.js").read_text(encoding="utf-8")
    version = re.match(r"// https://d3js.org/d3-hierarchy/ v(\S+) Copyright", library)[1]
    assert f"d3-hierarchy {version}" in (ASSETS / "page.py").read_text(encoding="utf-8")
    assert (ASSETS / "d3-hierarchy.LICENSE").read_text(encoding="utf-8") in page


@pytest.mark.parametrize("name", ["data.js", "table.js", "treemap.js", "page.js"])
def test_scripts_make_no_markup_from_text(name) -> None:
    source = (ASSETS / name).read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source)


@given(st.recursive(st.text(st.characters(exclude_categories=[])) | st.integers(), st.lists, max_leaves=5))
def test_data_is_read_as_it_was_written(value) -> None:
    block = data_block("name", {"key": value})
    inner = re.fullmatch(r'<script type="application/json" id="name">(.*)</script>', block)[1]
    assert inner.isascii()
    assert not set("<>&") & set(inner)
    assert json.loads(inner) == {"key": value}
