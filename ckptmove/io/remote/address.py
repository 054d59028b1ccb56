"""Tell URLs from local paths, and keep the credentials in URLs out of every text."""

from __future__ import annotations

import os
import re
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

#: A scheme of two letters or more: ``C:`` is a drive. ``::`` chains file systems in fsspec: ``zip://a.pth::s3://b/c``.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:://|::)")
#: Addresses of artifacts, which only their own tools can resolve.
_ARTIFACT: Final = re.compile(r"(?:wandb|wandb-artifact|mlflow|mlflow-artifacts|runs|models):")
# The patterns below are compiled on first use: a local path needs none of them.
#: Up to the next URL of a chain.
_URL_IN_TEXT: Final = r"([A-Za-z][A-Za-z0-9+.-]+)://((?:(?!::[A-Za-z][\w+.-]*://)[^\s'\"<>|\\])*)"
#: A secret key of AWS may have slashes: then all up to the last ``@``. A port has digits alone.
_USERINFO: Final = r"^(?:[^/?#]*|[^/?#:]*:(?!\d+(?:[/?#]|$))[^?#]*)@"
#: The value of a pair in a query, or the whole of a word without ``=``.
_WHOLE_URL: Final = r"(?s)([A-Za-z][A-Za-z0-9+.-]+)://(.*)"
_VALUE: Final = r"(?<==)[^&;]+|(?<![^&;])[^&;=]+(?![^&;])"
_NAMED_QUERY: Final = r"\?(?=[\w.~%-]+=)"
#: Credentials outside of a URL: keys of AWS, tokens of Hugging Face, and parameters that hold a secret. A token has
#: exactly 34 letters and digits: ``hf_safetensors.pth`` is the name of a file.
_SECRETS: Final = (
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bhf_[A-Za-z0-9]{34}(?!\w)|(?<=Bearer )\S+|(?<=Basic )[A-Za-z0-9+/=]{6,}"
    r"|(?i:(?<=signature=)|(?<=credential=)|(?<=token=)|(?<=password=)|(?<=secret=)|(?<=sig=))[^\s&'\"<>]+"
)
_HIDDEN: Final = "***"
_HTTP: Final = frozenset({"http", "https"})
#: In an address of the Hub, ``@`` begins a revision.
_HUB: Final = "hf"


class RemotePath(NamedTuple):
    """A path in a file system of fsspec."""

    fs: Any  # the file system
    path: str  # the path as the file system knows it


class Address(str):
    """A URL whose text has no credentials: no user, no password, no value of a query.

    Attributes:
        url: the URL as the user gave it.
        place: where a listing found it, so that it is not looked up again; None for a URL that was typed.
    """

    __slots__ = ("place", "url")

    url: str
    place: RemotePath | None

    def __new__(cls, url: str, place: RemotePath | None = None) -> Address:
        """Hide the credentials of a URL."""
        # The whole text is a URL here: a password may have spaces and quotes.
        whole = url if "::" in url else re.sub(_WHOLE_URL, _without_credentials, url)
        address = super().__new__(cls, redacted(whole))
        address.url, address.place = url, place
        return address

    def __getnewargs__(self) -> tuple[str]:
        """Keep the URL in a copy."""
        return (self.url,)

    @property
    def scheme(self) -> str:
        """The protocol in lower case: ``s3``."""
        return self.url.partition(":")[0].lower()

    @property
    def is_http(self) -> bool:
        """Whether it is a plain URL of a web server."""
        return self.scheme in _HTTP and "::" not in self.url

    @property
    def is_artifact(self) -> bool:
        """Whether it names an artifact of Weights & Biases or MLflow."""
        return _ARTIFACT.match(self.url) is not None

    @property
    def has_magic(self) -> bool:
        """Whether it is a glob. In the URL of a web server, ``?`` begins the query."""
        text = self.url.partition("?")[0] if self.is_http else re.split(_NAMED_QUERY, self.url)[0]
        return any(letter in text for letter in "*?[")

    @property
    def name(self) -> str:
        """The last part of its path, as the name of a local file."""
        path = urlsplit(self.url).path if self.is_http else re.split(_NAMED_QUERY, self.url)[0].partition("::")[0]
        last = unquote(path.rstrip("/").rpartition("/")[2])
        return re.sub(r'[\\/:*?"<>|\x00-\x1f]', "_", last).lstrip(".-") or "checkpoint"


def as_location(path: str | os.PathLike[str]) -> str:
    """A URL as an :class:`Address`, and any other path unchanged. A ``file://`` URL becomes the path that it names."""
    path = os.fspath(path)
    if isinstance(path, Address) or not (_URL.match(path) or _ARTIFACT.match(path)) or os.path.lexists(path):
        return path
    if path[:7].lower() == "file://":
        from urllib.request import url2pathname  # imports the clients of all protocols

        return url2pathname(urlsplit(path).path)
    return Address(path)


def is_url(path: str) -> bool:
    """Whether a path as it is shown is a URL."""
    return _URL.match(path) is not None


def redacted(text: str) -> str:
    """A text without the credentials in its URLs, and without keys and tokens that are known by their form."""
    return re.sub(_SECRETS, _HIDDEN, re.sub(_URL_IN_TEXT, _without_credentials, text)) if text else text


def _without_credentials(found: re.Match[str]) -> str:
    scheme, rest = found[1].lower(), found[2]
    hidden = rest if scheme == _HUB else re.sub(_USERINFO, f"{_HIDDEN}@", rest)
    mark = re.search(r"\?", hidden) if scheme in _HTTP else re.search(_NAMED_QUERY, hidden)
    if mark is not None:
        path, query = hidden[: mark.start()], hidden[mark.end() :]
        hidden = f"{path}?{re.sub(_VALUE, _HIDDEN, query.partition('#')[0]) if '=' in query else _HIDDEN}"
    return f"{found[1]}://{hidden}"
