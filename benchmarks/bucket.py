"""Serve a bucket of 225 checkpoints, for ``fleet.py``, which is a process of its own: torch and the bucket take memory.

python benchmarks/bucket.py MILLISECONDS    # prints the address, and serves until its standard input ends
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import torch
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from collections.abc import Iterable

#: How many checkpoints of each kind are in the bucket.
KINDS = {"torch.save, with AdamW": 100, "torch.save, legacy": 25, "safetensors": 50, "HF shards": 25, "dcp.save": 25}


class Bucket:
    """A server for S3 that answers late and counts its requests.

    ``GET /requests`` returns their number since it was last asked, and is not one of them.

    Attributes:
        delay: seconds before each answer.
        url: address of the server.
    """

    def __init__(self) -> None:
        self.delay, self._requests = 0.0, 0
        self._counting = threading.Lock()
        self._answers = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Silent)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.port}"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request."""
        with self._counting:
            if environ["PATH_INFO"] == "/requests":
                counted, self._requests = self._requests, 0
                start_response("200 OK", [])
                return [str(counted).encode()]
            self._requests += 1
        # The latency of a network.
        time.sleep(self.delay)
        answer: Iterable[bytes] = self._answers(environ, start_response)
        return answer


class Silent(WSGIRequestHandler):
    """A handler that logs nothing."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Do not log the request."""


def make(kind: str, path: Path) -> None:
    """Write a checkpoint of a model with 1.1 million parameters, in one file or in a folder."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = model.state_dict()
    state = {"model": weights, "optimizer": optimizer.state_dict(), "step": 1}
    path.mkdir(parents=True)
    if kind.startswith("torch.save"):
        torch.save(state, path / "last.pth", _use_new_zipfile_serialization=not kind.endswith("legacy"))
    elif kind == "dcp.save":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is no process group
            writer = FileSystemWriter(path / "step-1", thread_count=2)
            save({"model": weights, "step": 1}, storage_writer=writer, no_dist=True)
    elif kind == "safetensors":
        save_file(weights, path / "model.safetensors")
    else:
        names = {name: f"model-{1 + number // 2:05}-of-00004.safetensors" for number, name in enumerate(weights)}
        for file in {*names.values()}:
            save_file({name: one for name, one in weights.items() if names[name] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def fill(folder: Path) -> None:
    """Upload the checkpoints, and a log beside each of them."""
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for kind, number in KINDS.items():
        made = folder / kind
        make(kind, made)
        (made / "log.txt").write_text("loss 1\n")
        files = {file.relative_to(made).as_posix(): file.read_bytes() for file in made.rglob("*") if file.is_file()}
        for index in range(number):
            for name, content in files.items():
                client.put_object(Bucket="bucket", Key=f"runs/{kind}/{index}/{name}", Body=content)


def main() -> None:
    """Fill the bucket, and serve it."""
    bucket = Bucket()
    os.environ["AWS_ENDPOINT_URL"] = bucket.url
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder))
    bucket.delay = float(sys.argv[1]) / 1000
    print(bucket.url, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
