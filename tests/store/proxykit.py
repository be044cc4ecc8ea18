"""A bucket's prefix seen through a fault proxy, and without it."""

from __future__ import annotations

import contextlib
import uuid

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from localstack.fault_proxy import proxied
from tieredckpt.testing.proxy_acts import Switches

BUCKET = "proxied"


class Seen:
    """One prefix. `server` is the proxy's face of the server `upstream`; `client` goes through it, `stored` does not."""

    def __init__(self, upstream, server, proxy, timeout_s):
        self.upstream = upstream
        self.server = server
        self.proxy = proxy
        self.root = uuid.uuid4().hex
        self.client = client(server, timeout_s)
        self._direct = client(upstream)

    def put(self, name="key", data=b"data", **options):
        return self.client.put_object(Bucket=BUCKET, Key=f"{self.root}/{name}", Body=data, **options)

    def get(self, name="key"):
        return self.client.get_object(Bucket=BUCKET, Key=f"{self.root}/{name}")["Body"].read()

    def head(self, name="key"):
        return self.client.head_object(Bucket=BUCKET, Key=f"{self.root}/{name}")

    def names(self):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self.root}/")
        return [item["Key"].removeprefix(f"{self.root}/") for page in pages for item in page.get("Contents", ())]

    def delete(self, *names):
        objects = [{"Key": f"{self.root}/{name}"} for name in names]
        return self.client.delete_objects(Bucket=BUCKET, Delete={"Objects": objects})

    def stored(self, name="key"):
        """The object as it is on the server, or None."""
        with contextlib.suppress(self._direct.exceptions.NoSuchKey):
            return self._direct.get_object(Bucket=BUCKET, Key=f"{self.root}/{name}")["Body"].read()

    @property
    def operations(self):
        return [request.operation for request in self.proxy.requests]

    @property
    def statuses(self):
        return [request.status for request in self.proxy.requests]


def client(server, timeout_s=5.0, **options):
    """boto3 that sends each request once."""
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=options.pop("key", server.key),
        aws_secret_access_key=options.pop("secret", server.secret),
        region_name="us-east-1",
        config=Config(
            s3={"addressing_style": "path"}, retries={"total_max_attempts": 1, "mode": "standard"}, read_timeout=timeout_s
        ),
        **options,
    )


@contextlib.contextmanager
def seen_through(server, rules=(), switches=Switches(), timeout_s=5.0):
    server.make_bucket(BUCKET)
    with proxied(server, rules, switches) as (through, proxy):
        yield Seen(server, through, proxy, timeout_s)


def refused(call):
    """Status and code of the error that `call` gets from S3."""
    with pytest.raises(ClientError) as caught:
        call()
    return caught.value.response["ResponseMetadata"]["HTTPStatusCode"], caught.value.response["Error"]["Code"]
