"""Canonical JSON: one form per value, and a typed error for every other byte string."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from tieredckpt.errors import FormatError, UnsupportedVersionError
from tieredckpt.format import canonical
from tieredckpt.model.fields import MAX_INT, SafeInt, UtcText, utc_text


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    b: SafeInt = 0
    a: float = 0.0
    text: str = ""
    many: Annotated[tuple[int, ...], Meta(max_length=3)] = ()
    table: dict[str, float | str] = {}


def decode(data: bytes) -> Sample:
    return canonical.decode(data, Sample, max_bytes=1000, what="the sample")


GOOD = b'{"a":0.5,"b":1,"many":[],"table":{"x":1.0},"text":"y"}'


def test_every_field_is_written_and_keys_are_sorted_by_code_point():
    assert canonical.encode(Sample()) == b'{"a":0.0,"b":0,"many":[],"table":{},"text":""}'
    keys = ["\U0001f600", "\uffff", "é", "z", "Z", "a b", '"', "\n"]
    data = canonical.encode(Sample(table=dict.fromkeys(keys, 1.0)))
    assert list(decode(data).table) == sorted(keys)


@given(
    b=st.integers(-MAX_INT, MAX_INT),
    a=st.floats(allow_nan=False, allow_infinity=False),
    text=st.text(max_size=30),
    table=st.dictionaries(
        st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5), max_size=4
    ),
)
def test_values_round_trip_with_the_type_of_every_number(b, a, text, table):
    value = Sample(a=a, b=b, text=text, table=table)
    data = canonical.encode(value)
    back = canonical.decode(data, Sample, max_bytes=10_000, what="sample")
    assert (back, repr(back.a), repr(back.b)) == (value, repr(a), repr(b))
    assert canonical.encode(back) == data


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.1, "0.1"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (100.0, "100.0"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e16"),
        (1.5e300, "1.5e300"),
        (1e-5, "0.00001"),
        (1.5e-7, "1.5e-7"),
        (5e-324, "5e-324"),
        (123456789012345680.0, "1.2345678901234568e17"),
    ],
)
def test_the_spelling_of_floats_is_part_of_the_format(number, text):
    assert canonical.dump(number) == text.encode()


def test_the_good_sample_is_good():
    assert decode(GOOD) == Sample(a=0.5, b=1, text="y", table={"x": 1.0})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        GOOD + b" ",
        b" " + GOOD,
        GOOD + GOOD,
        GOOD[:-1],
        b"\xef\xbb\xbf" + GOOD,
        GOOD.replace(b'"b":1', b'"b":1.0'),
        GOOD.replace(b'"b":1', b'"b":9007199254740992'),
        GOOD.replace(b'"b":1', b'"b":-9007199254740992'),
        GOOD.replace(b'"b":1', b'"b":1' + b"0" * 5000),
        GOOD.replace(b'"b":1', b'"b":01'),
        GOOD.replace(b'"b":1', b'"b":-0'),
        GOOD.replace(b'"b":1', b'"b":1,"b":1'),
        GOOD.replace(b'"b":1', b'"b":true'),
        GOOD.replace(b'"b":1', b'"b":null'),
        GOOD.replace(b'"b":1', b'"b":"1"'),
        GOOD.replace(b'"b":1,', b""),
        GOOD.replace(b'"a":0.5,"b":1', b'"b":1,"a":0.5'),
        GOOD.replace(b"0.5", b"0.50"),
        GOOD.replace(b"0.5", b"5e-1"),
        GOOD.replace(b"0.5", b".5"),
        GOOD.replace(b"0.5", b"1e999"),
        GOOD.replace(b"0.5", b"NaN"),
        GOOD.replace(b"0.5", b"Infinity"),
        GOOD.replace(b"1.0", b"1"),
        GOOD.replace(b"1.0", b"null"),
        GOOD.replace(b'"x":1.0', b'"x":1.0,"x":1.0'),
        GOOD.replace(b'"x":1.0', b'"x":1.0,"w":1.0'),
        GOOD.replace(b'"y"', b'"\\u0079"'),
        GOOD.replace(b'"y"', b'"\\/"'),
        GOOD.replace(b'"y"', b'"\xff"'),
        GOOD.replace(b'"y"', b'"\xed\xa0\x80"'),
        GOOD.replace(b'"y"', b'"\\ud800"'),
        GOOD.replace(b'"y"', b'"\n"'),
        GOOD.replace(b'"y"', b'"y","z":1'),
        GOOD.replace(b"[]", b"[1,2,3,4]"),
        GOOD.replace(b"[]", b"[" * 300),
        b"[" * 2000,
        GOOD.replace(b'"y"', b'"' + b"y" * 1000 + b'"'),
    ],
)
def test_anything_but_the_one_form_is_a_format_error_that_names_it(data):
    with pytest.raises(FormatError, match="the sample"):
        decode(data)


@given(st.binary(max_size=200))
def test_no_bytes_make_another_error(data):
    with pytest.raises(FormatError):
        decode(data)


@given(at=st.integers(0, len(GOOD) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_gives_another_value_or_a_format_error(at, bit):
    damaged = bytearray(GOOD)
    damaged[at] ^= 1 << bit
    try:
        assert canonical.encode(decode(bytes(damaged))) == damaged
    except FormatError:
        return


@pytest.mark.parametrize(
    "value",
    [
        Sample(a=float("nan")),
        Sample(a=float("inf")),
        Sample(b=2**53),
        Sample(b=1.0),
        Sample(a=1),
        Sample(table={"x": 1}),
        Sample(text="\ud800"),
        Sample(many=(1, 2, 3, 4)),
        Sample(text=...),
        Sample(table={1: 1.0}),
    ],
    ids=repr,
)
def test_c123_what_could_not_be_read_back_is_not_written(value):
    with pytest.raises(FormatError, match="the sample"):
        canonical.encode(value, what="the sample")


def test_a_raw_part_of_any_depth_is_a_typed_error_or_untouched():
    class Holder(msgspec.Struct):
        raw: msgspec.Raw

    deep = b'{"raw":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(FormatError, match="holder"):
        canonical.decode(deep, Holder, max_bytes=10**6, what="holder")


def test_a_newer_version_is_refused_with_the_version_named():
    def check(data: bytes) -> None:
        canonical.check_version(data, "x", max_bytes=100, what="x.json")

    check(b'{"version":1,"format":"x","unknown":[]}')
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        check(b'{"format":"x","version":2}')
    for data in (b'{"format":"y","version":1}', b'{"format":"x","version":0}', b'{"format":"x"}', b"{}", b" " * 101):
        with pytest.raises(FormatError):
            check(data)


def test_times_are_texts_in_utc_with_microseconds():
    assert utc_text(0) == "1970-01-01T00:00:00.000000Z"
    assert utc_text(1.7e9 + 0.25) == "2023-11-14T22:13:20.250000Z"
    msgspec.convert(utc_text(1.7e9), UtcText)
