"""`mooncake disk` on a directory that this file writes byte by byte, as the format says."""

from __future__ import annotations

import fcntl
import json
import struct
from pathlib import Path

import pytest
from test_commands import command

UNIT = 4096
EXTENT = 16 * UNIT
ID = bytes(range(16))
MARK = 0x1234_5678_9ABC_DEF0
PAYLOAD = b"payload"


def crc32c(data: bytes) -> int:
    """Return the CRC-32C, computed bit by bit."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def summed(data: bytes) -> bytes:
    return data + struct.pack("<I", crc32c(data))


def record(key: bytes, offset: int) -> bytes:
    tenant = b"default"
    head_bytes = 48 + 4 + len(tenant) + len(key) + 4
    fixed = struct.pack(
        "<4sIQQQQII", b"mckR", head_bytes, MARK, offset, 7, len(PAYLOAD), 7, len(key)
    )
    head = summed(fixed + struct.pack("<I", crc32c(PAYLOAD)) + tenant + key)
    return head + PAYLOAD + bytes(-(head_bytes + len(PAYLOAD)) % 8)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with an extent that was open when its process was killed."""
    fields = f"format 1\nfeatures 0\nid {ID.hex()}\nincarnation 1\nunit {UNIT}\n"
    text = f"mooncake records\n{fields}extent_bytes {EXTENT}\n"
    (tmp_path / "identity").write_text(f"{text}crc32c {crc32c(text.encode()):08x}\n")
    extent = bytearray(EXTENT)
    head = summed(struct.pack("<8s16sQQI", b"mckEXTNT", ID, 1, MARK, 1))
    extent[: len(head)] = head
    first = record(b"first", UNIT)
    both = first + record(b"sec\xffond", UNIT + len(first))
    extent[UNIT : UNIT + len(both)] = both
    (tmp_path / "extent-000000").write_bytes(extent)
    return tmp_path


def test_disk_ls_names_the_records(directory: Path):
    done = command("disk", "ls", str(directory))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[:2]] == [
        ["TENANT", "KEY"],
        ["default", "first"],
    ]
    rows = json.loads(command("disk", "ls", "--json", str(directory)).stdout)
    assert [(row["key"], row["version"], row["bytes"]) for row in rows] == [
        ("first", 7, 7),
        ("sec\udcffond", 7, 7),
    ]
    assert not rows[0]["is_sealed"]


def test_disk_verify_counts_the_records_that_hold(directory: Path):
    whole = json.loads(command("disk", "verify", "--json", str(directory)).stdout)
    assert whole == {"extents": 1, "records": 2, "bytes": 14, "damaged": [], "unreadable": []}
    extent = directory / "extent-000000"
    # The list of a sealed extent names a record whose payload has changed since.
    content = bytearray(extent.read_bytes())
    entries = b"".join(
        struct.pack("<IQQII", offset, 7, 7, 7, len(key)) + b"default" + key
        for key, offset in [(b"first", UNIT), (b"sec\xffond", UNIT + len(record(b"first", UNIT)))]
    )
    content[2 * UNIT : 2 * UNIT + len(entries)] = entries
    trailer = struct.pack("<8sQQQI", b"mckINDEX", MARK, 2 * UNIT, len(entries), crc32c(entries))
    content[EXTENT - UNIT : EXTENT - UNIT + 40] = summed(trailer)
    content[content.index(PAYLOAD)] ^= 1
    extent.write_bytes(content)
    done = command("disk", "verify", str(directory))
    assert (done.returncode, done.stderr) == (1, "")
    assert "damaged: first of tenant default, version 7" in done.stdout
    assert "1 records are whole" in done.stdout


def test_disk_commands_go_on_past_an_extent_that_cannot_be_read(directory: Path):
    unreadable = directory / "extent-000001"
    unreadable.symlink_to(unreadable)
    done = command("disk", "verify", str(directory))
    assert done.returncode == 1
    assert "2 records are whole" in done.stdout
    assert f"cannot read {unreadable}: " in done.stdout
    found = json.loads(command("disk", "verify", "--json", str(directory)).stdout)
    assert (found["records"], found["unreadable"][0]["path"]) == (2, str(unreadable))
    done = command("disk", "ls", str(directory))
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 3)
    assert f"cannot read {unreadable}: " in done.stderr


def test_disk_wipe_needs_consent_and_leaves_no_record(directory: Path):
    done = command("disk", "wipe", str(directory))
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert (directory / "extent-000000").exists()
    done = command("disk", "wipe", "--yes", str(directory))
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in directory.iterdir()] == ["lock"]


def test_disk_in_use_is_refused_with_its_holder(directory: Path):
    with (directory / "lock").open("w") as lock:
        lock.write("process 12 on here\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in [("ls",), ("verify",), ("wipe", "--yes")]:
            done = command("disk", *words, str(directory))
            assert done.returncode == 1
            assert "in use by process 12 on here" in done.stderr
    assert (directory / "extent-000000").exists()


def test_disk_of_something_else_or_of_later_versions_is_refused(directory: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    done = command("disk", "wipe", "--yes", str(other))
    assert done.returncode == 1
    assert "no identity file" in done.stderr
    assert list(other.iterdir()) == []
    identity = directory / "identity"
    identity.write_text(identity.read_text().replace("format 1", "format 2"))
    done = command("disk", "ls", str(directory))
    assert done.returncode == 1
    assert "later version of mooncake (format 2" in done.stderr
