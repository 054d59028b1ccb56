"""One HTML file with its style, its scripts and its data, under a policy that permits nothing else."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.html import HEAD
from ckptmove.cli.render.html.markup import Markup, element

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.api.document import Json

_HERE: Final = Path(__file__).parent
_STYLE: Final = "page.css"
#: Our scripts, in their order in the page.
_SCRIPTS: Final = ("data.js", "table.js", "treemap.js", "page.js")
#: d3-hierarchy 3.1.3, from ``npm pack d3-hierarchy``, and its license, which goes with every copy.
_LIBRARY: Final = ("d3-hierarchy.LICENSE", "d3-hierarchy.min.js")


def whole_page(title: str, content: Iterable[Markup]) -> str:
    """Return an HTML document.

    The Content-Security-Policy names the hashes of its style and its scripts, so that a browser runs nothing else and
    loads nothing.
    """
    style = _asset(_STYLE)
    license_text, library = map(_asset, _LIBRARY)
    scripts = [f"/*!\n{license_text}*/\n{library}", '"use strict";\n' + "\n".join(map(_asset, _SCRIPTS))]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    body = element("body", *content, *(element("script", Markup(script)) for script in scripts))
    return f"{HEAD.decode()}{element('html', element('head', *head), body, lang='en')}\n"


def data_block(name: str, data: Json) -> Markup:
    """Return an element with data for the scripts of the page; browsers never run it, and no text in it can end it."""
    # In a JSON string, an escape means the same character.
    written = json.dumps(data, separators=(",", ":")).translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})
    return element("script", Markup(written), type="application/json", id=name)


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"
