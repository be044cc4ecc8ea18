"""The list of unfinished uploads, page by page. That they are found and aborted on a server: `tests/cli/test_collecting.py`."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tieredckpt.errors import StoreError
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.multipart import UnfinishedUpload, has_multipart, list_unfinished
from tieredckpt.store.s3 import S3Store

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = [("run/a", "1"), ("run/a", "2"), ("run/b", "1"), ("run/c", "1"), ("run/c", "2")]
"""Two uploads may have one key, and a page may end between them."""


def pages(request: dict, size: int = 2) -> dict:
    marker = (request.get("KeyMarker", ""), request.get("UploadIdMarker", ""))
    left = [name for name in NAMES if name > marker]
    page = {"Uploads": [{"Key": key, "UploadId": number, "Initiated": BEGUN} for key, number in left[:size]]}
    if len(left) > size:
        page |= {"IsTruncated": True, "NextKeyMarker": left[size - 1][0], "NextUploadIdMarker": left[size - 1][1]}
    return page


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_every_page_is_read(size: int):
    found = list(list_unfinished(lambda request: pages(request, size), "bucket", "run/"))
    assert [("run/" + upload.key, upload.upload_id) for upload in found] == NAMES
    assert found[0] == UnfinishedUpload("a", "1", "2026-01-01T00:00:00+00:00")


def test_what_a_server_says_beyond_the_prefix_is_not_ours_c43():
    """Some ignore the prefix of this request."""
    page = {"Uploads": [{"Key": "run-2/a", "UploadId": "1"}, {"Key": "run/a", "UploadId": "2"}]}
    assert [upload.upload_id for upload in list_unfinished(lambda _: page, "bucket", "run/")] == ["2"]


@pytest.mark.parametrize(
    "broken", [{"IsTruncated": True}, {"IsTruncated": True, "NextKeyMarker": "run/a", "NextUploadIdMarker": "2"}]
)
def test_a_list_that_breaks_off_or_goes_round_is_an_error(broken: dict):
    with pytest.raises(StoreError, match="breaks off"):
        list(list_unfinished(lambda _: broken, "bucket", "run/"))


def test_which_stores_have_them_is_asked_by_name():
    assert has_multipart(S3Store.__new__(S3Store))
    assert not has_multipart(MemoryStore())
