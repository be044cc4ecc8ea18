"""The few numbers that a user may set. Frozen, checked at construction, never read from the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tieredckpt.errors import UsageError

PAGE_BYTES = 4096
"""Alignment of pieces in packs and in staging memory, so that both can be moved by O_DIRECT."""

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes, digests, parallelism and deadlines of one `Checkpointer`.

    pack_bytes        most data bytes in one pack, a multiple of 4096 (default 64 MiB; one pack is one plain PUT)
    piece_bytes       most bytes in one piece, at most `pack_bytes` (default 16 MiB)
    digest            `"blake3"` (default) or `"sha256"`
    codec             `"raw"` (default), or `"zstd"`: pieces that get smaller by it are stored compressed
    stale             what a save does whose trained parameters are all unchanged although steps were taken: `"warn"` (default:
                      `StaleStateWarning`), `"error"` (it fails, `StaleStateError`) or `"ignore"`
    copy_threads      threads that copy the state aside, and that hash and write it
    upload_threads    packs that are sent at the same time
    request_timeout_s a store that makes no progress for so long has failed this request
    commit_timeout_s  a conditional put whose fate is unknown for so long ends as `OutcomeUnknownError`
    rank_timeout_s    a rank that has not been heard of for so long has failed this save or restore
    """

    pack_bytes: int = 64 * MIB
    piece_bytes: int = 16 * MIB
    digest: Literal["blake3", "sha256"] = "blake3"
    codec: Literal["raw", "zstd"] = "raw"
    stale: Literal["warn", "error", "ignore"] = "warn"
    copy_threads: int = 2
    upload_threads: int = 4
    request_timeout_s: float = 60.0
    commit_timeout_s: float = 60.0
    rank_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("pack_bytes", "piece_bytes", "copy_threads", "upload_threads"):
            value = getattr(self, name)
            if type(value) is not int or value <= 0:
                raise UsageError(f"Settings.{name} must be a positive int, got {value!r}")
        for name in ("request_timeout_s", "commit_timeout_s", "rank_timeout_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not value > 0:
                raise UsageError(f"Settings.{name} must be a positive number of seconds, got {value!r}")
        if self.pack_bytes % PAGE_BYTES:
            raise UsageError(f"Settings.pack_bytes must be a multiple of {PAGE_BYTES}, got {self.pack_bytes}")
        if self.piece_bytes > self.pack_bytes:
            raise UsageError(f"Settings.piece_bytes ({self.piece_bytes}) must not exceed pack_bytes ({self.pack_bytes})")
        if self.piece_bytes < 16:
            raise UsageError("Settings.piece_bytes must hold at least one element of every dtype: 16 bytes")
        if self.codec not in ("raw", "zstd"):
            raise UsageError(f'Settings.codec must be "raw" or "zstd", got {self.codec!r}')
        if self.stale not in ("warn", "error", "ignore"):
            raise UsageError(f'Settings.stale must be "warn", "error" or "ignore", got {self.stale!r}')
        if self.digest not in ("blake3", "sha256"):
            raise UsageError(f'Settings.digest must be "blake3" or "sha256", got {self.digest!r}')
