from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.io.locations import default_output, inside, without_suffix
from ckptmove.io.remote.address import Address, as_location, is_url, redacted

SECRETS = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+_.-", min_size=9, max_size=30)
#: Of the length of a real one.
HUB_TOKEN = "hf_" + "aB3" * 11 + "z"


@pytest.mark.parametrize(
    "path",
    ["run.pth", "C:\\runs\\a.pth", "c:/runs/a.pth", "C://a", "./https:/a", "a:b", "~/a.pth", "", "-", "dir/s3", "x::y"],
)
def test_local_paths_stay(path) -> None:
    assert as_location(path) is path
    assert not is_url(path)


@pytest.mark.parametrize(
    "url",
    [
        "https://h/a.pth",
        "s3://b/a",
        "hf://o/r/a.bin",
        "gs://b/a",
        "memory://a",
        "zip://a.pth::s3://b/c.zip",
        "S3://b/a",
    ],
)
def test_urls_are_addresses(url) -> None:
    location = as_location(url)
    assert isinstance(location, Address)
    assert (location, location.url) == (url, url)
    assert as_location(location) is location
    assert is_url(location)


@pytest.mark.parametrize("word", ["wandb:o/p/a:v0", "wandb-artifact://o/p/a:v0", "runs:/1/a.pth", "models:/m/1"])
def test_artifacts_are_addresses(word) -> None:
    location = as_location(word)
    assert isinstance(location, Address)
    assert location.is_artifact


def test_a_file_of_that_name_is_a_path(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs:").touch()
    assert type(as_location("runs:")) is str


@pytest.mark.skipif(os.name != "posix", reason="the paths of POSIX")
def test_file_urls_are_paths() -> None:
    assert as_location("file:///runs/a%20b.pth") == "/runs/a b.pth"
    assert as_location("FILE://localhost/runs/*.pth") == "/runs/*.pth"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:p@h:80/a.pth", "https://***@h:80/a.pth"),
        ("https://token@h/a.pth", "https://***@h/a.pth"),
        ("https://u:p 'w@h/a.pth", "https://***@h/a.pth"),
        ("https://h:80/a@v1.pth", "https://h:80/a@v1.pth"),
        ("s3://key:sec/ret@bucket/a.pth", "s3://***@bucket/a.pth"),
        ("https://h/a.pth?X-Amz-Signature=1a2b&x=1", "https://h/a.pth?X-Amz-Signature=***&x=***"),
        ("https://h/a.pth?1a2b", "https://h/a.pth?***"),
        ("https://h/a.pth?1a2b&Expires=5;3c4d&=5e", "https://h/a.pth?***&Expires=***;***&=***"),
        ("https://h/a.pth?a=b#c=d", "https://h/a.pth?a=***"),
        ("s3://bucket/run?/a.pth", "s3://bucket/run?/a.pth"),
        ("s3://key:secret@bucket/a.pth?versionId=5", "s3://***@bucket/a.pth?versionId=***"),
        ("hf://org/repo@main/a.pth", "hf://org/repo@main/a.pth"),
        ("hf://gpt2@main/a.pth", "hf://gpt2@main/a.pth"),
        ("gs://bucket/a.pth#17", "gs://bucket/a.pth#17"),
        ("zip://a.pth::https://u:p@h/b.zip?sig=1", "zip://a.pth::https://***@h/b.zip?sig=***"),
    ],
)
def test_the_text_of_an_address_has_no_credentials(url, shown) -> None:
    address = Address(url)
    assert address == shown
    assert address.url == url


@given(SECRETS, SECRETS, st.sampled_from(["https", "http", "s3", "ftp"]))
def test_secrets_are_hidden_wherever_they_are(user, value, scheme) -> None:
    url = f"{scheme}://{user}:{value}@host/dir/a.pth?token={value}&x={user}"
    for text in (url, f"Cannot connect to '{url}': [refused]", f'url="{url}", retry {url}'):
        found = redacted(text)
        assert f":{value}@" not in found
        assert f"={value}" not in found
        assert f"={user}" not in found
        assert "host/dir/a.pth" in found


def test_keys_and_tokens_are_hidden_in_any_text() -> None:
    keys = f"AKIAIOSFODNN7EXAMPLE {HUB_TOKEN} Bearer eyJhbGci.x Authorization: Basic dXNlcjpwYXNz"
    found = redacted(f"{keys} token=tttt Signature=ss%2B")
    for secret in ("AKIAIOSF", HUB_TOKEN, "eyJ", "dXNl", "tttt", "ss%2B"):
        assert secret not in found
    assert redacted("") == ""
    assert redacted("a token of 12") == "a token of 12"


@pytest.mark.parametrize(
    "text",
    [
        "Invalid user token: {}",
        "401 Client Error for https://huggingface.co/api/models?t={}",
        "{{'Authorization': 'Bearer {}'}}",
        "HF_TOKEN={}.",
        "https://user:{}@huggingface.co/org/repo",
        "https://{}@huggingface.co/org/repo",
        "({})",
        "/root/.cache/huggingface/{}/a.pth",
    ],
)
def test_tokens_of_the_hub_are_hidden(text) -> None:
    assert HUB_TOKEN not in redacted(text.format(HUB_TOKEN))


@pytest.mark.parametrize(
    "path",
    [
        "hf_safetensors.pth",
        "runs/hf_transformers/a.pth",
        "/data/hf_llama2finetuned8bit/model.safetensors",
        f"{HUB_TOKEN}more.pth",
        f"{HUB_TOKEN}_1.pth",
        f"my{HUB_TOKEN}.pth",
        "hf://org/hf_safetensors/hf_quantized.pth",
        "s3://bucket/hf_checkpoint/a.pth",
    ],
)
def test_names_that_begin_like_a_token_stay_whole(path) -> None:
    assert redacted(path) == path
    assert redacted(f"{path}: no such file") == f"{path}: no such file"
    assert Address(path) == path


def test_an_address_survives_copies() -> None:
    address = Address("https://u:p@h/a.pth")
    for copied in (copy.copy(address), copy.deepcopy(address), pickle.loads(pickle.dumps(address))):
        assert (copied, copied.url, copied.place) == (address, address.url, None)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://h/runs/last%20one.pth?sig=1/2", "last one.pth"),
        ("s3://bucket/runs/1/", "1"),
        ("s3://bucket/a.pth?versionId=1", "a.pth"),
        ("hf://org/repo@refs%2Fpr%2F1/a.bin", "a.bin"),
        ("https://h", "checkpoint"),
        ("https://h/..%2F..%2Fetc", ".._.._etc".lstrip(".")),
        ("https://h/-rf", "rf"),
        ("zip://in/a.pth::s3://b/c.zip", "a.pth"),
    ],
)
def test_the_name_of_a_local_copy(url, name) -> None:
    assert Address(url).name == name


def test_outputs_of_a_url_are_in_the_working_directory() -> None:
    address = Address("https://h/runs/a.pth.tar?sig=1")
    assert default_output(address, "cuda0") == "a.cuda0.pth.tar"
    assert without_suffix(address) == "a"
    assert inside("out", address) == str(Path("out", "a.pth.tar"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/a.pth?x=*", False),
        ("https://h/*.pth?x=1", True),
        ("s3://b/run?/a.pth", True),
        ("s3://b/a.pth?versionId=1", False),
        ("s3://b/run[12]/a.pth", True),
        ("s3://b/a.pth", False),
    ],
)
def test_globs(url, expected) -> None:
    assert Address(url).has_magic is expected
