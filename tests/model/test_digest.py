"""Digests and checksums: known answers, any buffer, combination."""

from __future__ import annotations

import hashlib

import pytest

from tieredckpt.errors import FormatError
from tieredckpt.model.digest import algorithm_of, crc64, digest, digest_like, new_hasher, sha256_digest

DATA = bytes(range(256)) * 40


def test_known_answers_of_the_specifications():
    assert digest("blake3", b"") == "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest("sha256", b"abc") == "sha256:" + hashlib.sha256(b"abc").hexdigest()
    assert crc64(b"123456789") == "ae8b14860a799888"
    assert crc64(b"") == "0" * 16


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: memoryview(b"xx" + data + b"yy")[2:-2]])
@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_every_kind_of_buffer_has_the_digest_of_its_bytes(wrap, algorithm):
    assert digest(algorithm, wrap(DATA)) == digest(algorithm, DATA)
    assert crc64(wrap(DATA)) == crc64(DATA)
    assert digest_like(f"{algorithm}:anything", wrap(DATA)) == digest(algorithm, DATA)
    hasher = new_hasher(algorithm)
    hasher.update(wrap(DATA[:1000]))
    hasher.update(wrap(DATA[1000:]))
    assert f"{algorithm}:{hasher.hexdigest()}" == digest(algorithm, DATA)


def test_a_flipped_bit_changes_digest_and_crc():
    flipped = bytearray(DATA)
    flipped[5000] ^= 1
    assert crc64(flipped) != crc64(DATA)
    assert sha256_digest(flipped) != sha256_digest(DATA)
    assert digest("blake3", flipped) != digest("blake3", DATA)


@pytest.mark.parametrize("tag", ["md5:0000", "", ":", "SHA256:00"])
def test_an_unknown_algorithm_is_refused(tag):
    with pytest.raises(FormatError, match="unknown digest algorithm"):
        digest_like(tag, b"")


def test_the_algorithm_is_the_part_before_the_colon():
    assert (algorithm_of("sha256:00"), algorithm_of("blake3:00")) == ("sha256", "blake3")
