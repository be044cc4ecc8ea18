"""Bad ids, keys and URLs: escapes, control characters, other alphabets, lengths, secrets."""

from __future__ import annotations

ULID = "01JBBBBBBBBBBBBBBBBBBBBBB1"
SNAPSHOT = f"000000000500-{ULID}-000001"
PACK = f"data/e7/{SNAPSHOT}.00000-0.safetensors"

IDS = (
    "", ".", "..", "/", "latest", SNAPSHOT[:-1], SNAPSHOT + "0", f" {SNAPSHOT}", f"{SNAPSHOT}\n", f"{SNAPSHOT}\0", SNAPSHOT.lower(),
    SNAPSHOT.replace("0", "\u0660"), SNAPSHOT.replace("0", "\uff10"), SNAPSHOT.replace("1", "l"), SNAPSHOT.replace("B", "\u0392"),
    SNAPSHOT.replace("-", "\u2010"), SNAPSHOT.replace("-", "_"), f"-{SNAPSHOT}", f"{SNAPSHOT}-", f"{SNAPSHOT}-{ULID[:-1]}",
    f"{SNAPSHOT}-{ULID}-{ULID}", f"../{SNAPSHOT}", f"{SNAPSHOT}/..", f"{SNAPSHOT}/manifest.json.zst", f"fresh-{SNAPSHOT}",
    "8" + ULID[1:], ULID.replace("B", "I"), ULID.replace("B", "U"), "0" * 4_000_000, "\ud800", f"+{SNAPSHOT[1:]}", f"0x{SNAPSHOT[2:]}",
)  # fmt: skip
"""None is a snapshot id."""

GOOD_IDS = (SNAPSHOT, f"fresh-{ULID}", f"{SNAPSHOT}-{ULID}")

KEYS = (
    "", ".", "..", "/", "//", "a/", "/a", "a//b", "a/../b", "a/./b", "../a", "./a", "a/..", ".a", "a/.b", "a b", "a\tb", "a\nb", "a\0b",
    "a\\b", "C:\\a", "C:/a", "~/a", "$HOME", "a;b", "a|b", "a*", "a?b", "a[b]", "%2e%2e/a", "a%2fb", "\u2024\u2024/a", "\uff0e\uff0e/a",
    "a\u2215b", "a\u202eb", "\u0430", "\xe9", "\ud800", "a" * 513, "a/" * 300 + "a", "a\x7f", "a\x1b[31m", "a:b", "a@b", "a#b", "a,b",
)  # fmt: skip
"""None is a key of any store."""

PACK_KEYS = (
    PACK.upper(), PACK.replace("e7", "e8"), PACK.replace("e7", "E7"), PACK.replace("e7", "e7/e7"), PACK.replace("data", "Data"),
    PACK.replace("-0.s", "-00.s"), PACK.replace("-0.s", "--1.s"), PACK.replace("-0.s", "-1000000.s"), PACK.replace(".00000", ".0000"),
    PACK.replace(".00000", ".100000"), PACK + "\n", PACK + ".tmp", "/" + PACK, "./" + PACK, PACK.replace("/", "//"),
    PACK.replace("/", "\\"), PACK.replace(".safetensors", ".pt"), PACK.replace("0", "\u0660"), f"data/../{PACK}", f"{PACK}/x", "",
)  # fmt: skip
"""None is the key of a pack."""

URLS = (
    "", "\0", "s3:", "s3:/b/p", "s3://", "s3:///p", "s3://b/p", "s3://[", "s3://[bucket/p", "s3://bucket]/p", "s3://b\u2100kt/p", "s3://buc\nket/p",
    "s3://bucket/\trun", "s3://bucket\r/run", " s3://bucket/run", "s3://bucket:99999/run", "s3://user@bucket/run", "s3://key:secret@bucket/run",
    "s3://bucket/..", "s3://bucket/a/../b", "s3://bucket//a", "s3://bucket/a//b", "s3://bucket/a b", "s3://bucket/%2e%2e", "s3://bucket/a#b",
    "s3://bucket/\u0430", "s3://bucket/" + "a" * 600, "s3://" + "b" * 300 + "/a", "s3://\uff42\uff55\uff43ket/a", "s3://bucket/a?x=1",
    "s3://bucket/a?region=", "s3://bucket/a?region=eu&region=us", "s3://bucket/a?region=a%0ab", "s3://bucket/a?region=../x",
    "s3://bucket/a?secret=x", "s3://bucket/a?KEY=x", "s3://bucket/a?endpoint_url=", "s3://bucket/a?endpoint_url=ftp://h",
    "s3://bucket/a?endpoint_url=http://", "s3://bucket/a?endpoint_url=http://[::1", "s3://bucket/a?endpoint_url=http://h:99999999",
    "s3://bucket/a?endpoint_url=http://h:x", "s3://bucket/a?endpoint_url=http://h:0", "s3://bucket/a?endpoint_url=http://u:p@h",
    "s3://bucket/a?endpoint_url=http://h?x", "s3://bucket/a?endpoint_url=http://h%23x", "s3://bucket/a?endpoint_url=http://h%0a",
    "s3://bucket/a?endpoint_url=http://h%20h", "s3://bucket/a?endpoint_url=file:///etc/passwd", "s3://bucket/a?endpoint_url=http://\u2100",
    "s3://bucket/a?" + "&".join(f"x{n}=1" for n in range(2000)), "file://host/a", "file://", "file://a", "file:relative", "file:///a?x", "file:///a#x",
    "file:///a%00b", "file://[", "file:///\ud800", "file:///a\nb", "memory://", "memory:///", "memory://..", "memory://a b", "memory://a?b",
    "memory://a/../b", "gs://[x", "gs://", "gs://b?region=x", "gs://b?endpoint_url=http://[", "gs://key:secret@b", "az://x#y", "gs://b/..", "gs://b\n/x",
    "http://bucket/a", "https://bucket", "s3a://bucket", "data://x", "github://x", "zip://x", "s4://bucket", "S4://x", "://x", "a b://x", "\ud800://x",
    "/tmp/\ud800", "/tmp/a\0b", "~\ud800",
)  # fmt: skip
"""None says where a tier is."""

GOOD_URLS = (
    "s3://bucket/a/b?region=eu&endpoint_url=http://h:9000/x",
    "file:///a/b",
    "/a/b",
    "memory://a/b",
    "gs://b/p",
    "az://c@a.b/p",
)
