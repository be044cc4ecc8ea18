"""The honesty of the benchmark of S3 clients: everything is sent and read, by the client that is named, and a cheat is found out."""

from __future__ import annotations

import json

import pytest

from benchmarks import s3_clients
from tieredckpt.errors import UsageError
from tieredckpt.store.s3 import S3Store

QUICK = ["--packs", "2", "--pack-mib", "1", "--threads", "2", "--rounds", "2"]


def test_the_whole_command_measures_both_clients_in_every_round(capsys):
    assert s3_clients.main([*QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == 2 << 20
    for what in ("put", "get"):
        for client in ("obstore", "boto3"):
            rounds = found["seconds_and_cpu_s"][what][client]
            assert len(rounds) == 2
            assert all(seconds > 0 and cpu_s > 0 for seconds, cpu_s in rounds)


def test_a_real_bucket_is_left_empty(moto, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    url = f"{moto.make_bucket('bench')}/scratch?endpoint_url={moto.endpoint_url}"
    # moto keeps bytes, so what is read back there is what was sent
    assert s3_clients.main([*QUICK, "--url", url]) == 0
    assert "obstore/boto3" in capsys.readouterr().out
    assert moto.client().list_objects_v2(Bucket="bench")["KeyCount"] == 0


def test_a_client_that_reads_nothing_is_found_out(monkeypatch):
    monkeypatch.setattr(S3Store, "read_into", lambda *_: None)
    with pytest.raises(s3_clients.WrongBytesError, match="other bytes"):
        s3_clients.main(QUICK)


def test_a_client_that_lets_the_other_one_work_is_found_out(monkeypatch):
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "AES256")
    with pytest.raises(UsageError, match="AWS_SERVER_SIDE_ENCRYPTION"):
        s3_clients.main(QUICK)
