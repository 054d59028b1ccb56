"""moto as a server for S3 on localhost, and the requests of s3fs."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(scope="module")
def moto():
    """A server for S3, its address, and a client that uploads to it."""
    server_module = pytest.importorskip("moto.server")
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMIEXAMPLEKEY")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3 = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        s3.start()
        host, port = s3.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        yield client
        client.close()
        s3.stop()


@pytest.fixture
def sent(moto, monkeypatch):
    """The method, path and Range of each request of s3fs."""
    import s3fs
    from aiobotocore.httpsession import AIOHTTPSession

    log = []

    async def send(self, request):
        found = request.headers.get("Range")
        log.append((request.method, request.url.split("/", 3)[3], found.decode() if found else None))
        return await whole(self, request)

    whole = AIOHTTPSession.send
    monkeypatch.setattr(AIOHTTPSession, "send", send)
    s3fs.S3FileSystem.clear_instance_cache()
    return log
