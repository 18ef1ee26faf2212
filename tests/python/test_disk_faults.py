"""The disk tier while processes are killed, a file system is full, and directories are in use."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess, start_master

import mooncake
from mooncake.store import MooncakeDistributedStore

IS_LONG = os.environ.get("MOONCAKE_LONG_TESTS") == "1"
# Of each way to end an owner.
KILLS = 50 if IS_LONG else 2
LIMIT_S = 60
WAIT_S = 0.005
KEYS = 300
SIZES = (100, 5_000, 70_000, 300_000)

OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1],
                   enable_ssd_offload=True, ssd_offload_path=sys.argv[2])
print(code, flush=True)
sys.stdin.read()
store.close()
"""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(WAIT_S)


def joined(address: str, segment: int, **settings: object) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    setup = ("127.0.0.1", "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", address)
    assert store.setup(*setup, **settings) == 0
    return store


def value(key: str, turn: int) -> bytes:
    """Return what a key holds after this put."""
    source = random.Random(f"{key} {turn}")
    return source.randbytes(source.choice(SIZES))


class Owner:
    """A process that has the directory open: the daemon, or a program with a store."""

    def __init__(self, kind: str, address: str, folder: Path) -> None:
        environment = os.environ | {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": "512MB",
        }
        daemon = ("-m", "mooncake.cli_client", "--host=127.0.0.1", "--port=0")
        options = ("--metadata_server=P2PHANDSHAKE", "--global_segment_size=0", "--enable_offload")
        command = {
            "daemon": (*daemon, f"--master_server_address={address}", *options),
            "store": ("-c", OWNER, address, str(folder)),
        }[kind]
        self.process = subprocess.Popen(
            (sys.executable, *command),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def end(self, how: str) -> None:
        """End the process: by a signal, or by `close()`."""
        if how == "close":
            assert self.process.stdin is not None
            self.process.stdin.close()
        else:
            self.process.send_signal(getattr(signal, how))
        self.process.wait(LIMIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Load:
    """Puts, gets and removes at random in a thread, and knows what each key holds."""

    def __init__(self, store: MooncakeDistributedStore, seed: int) -> None:
        self.store = store
        self.turns: dict[str, int] = {}
        self.removed: set[str] = set()
        # Calls that failed, as while a master is away: nothing is known of these keys.
        self.unknown: set[str] = set()
        self.wrong: list[str] = []
        self._random = random.Random(seed)
        self._turn = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def act(self) -> None:
        """Do one thing."""
        key = f"k{self._random.randrange(KEYS)}"
        choice = self._random.random()
        if choice < 0.55:
            self._turn += 1
            # A put of a key that exists does nothing.
            self._remove(key)
            if self.store.put(key, value(key, self._turn)) == 0:
                self.unknown.discard(key)
                self.removed.discard(key)
                self.turns[key] = self._turn
            else:
                self.unknown.add(key)
        elif choice < 0.65:
            self._remove(key)
        else:
            self.check(key)

    def _remove(self, key: str) -> None:
        # Forced: a lease does not matter here. -704: there was none.
        code = self.store.remove(key, True)
        self.turns.pop(key, None)
        if code in (0, -704):
            self.removed.add(key)
            self.unknown.discard(key)
        else:
            self.unknown.add(key)

    def check(self, key: str) -> bool:
        """Read a key; return whether it was there."""
        found = self.store.get(key)
        if key in self.unknown or found == b"":
            return False
        if key in self.removed:
            self.wrong.append(f"{key} is back")
        elif key in self.turns and found != value(key, self.turns[key]):
            self.wrong.append(f"{key} has wrong bytes")
        return True

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.act()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Go on in a thread."""
        self._stopping.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()


def on_disk(store: MooncakeDistributedStore, keys: list[str]) -> set[str]:
    """Return the keys of which a disk has a copy that counts."""
    found = store.batch_get_replica_desc(keys)
    return {
        key for key, copies in found.items() if any(copy.is_local_disk_replica() for copy in copies)
    }


def await_owner(load: Load) -> None:
    """Act until an object that was put since is on disk."""

    def is_written() -> bool:
        load.act()
        newest = max(load.turns, key=load.turns.__getitem__, default=None)
        return newest is not None and newest in on_disk(load.store, [newest])

    until(is_written, "the owner writes nothing")


def unchanged(keys: set[str], turns: dict[str, int], load: Load) -> list[str]:
    """Return those of the keys that were neither removed nor put anew since."""
    return [key for key in keys if load.turns.get(key) == turns[key] and key not in load.unknown]


def await_records(load: Load, keys: list[str]) -> None:
    """Wait until 95 % of the records count again, and read all of the objects."""
    found: set[str] = set()

    def are_back() -> bool:
        found.clear()
        found.update(on_disk(load.store, keys))
        return len(found) >= 0.95 * len(keys)

    until(are_back, f"of {len(keys)} records too few come back")
    readable = [key for key in keys if load.check(key)]
    assert len(readable) >= 0.95 * len(keys), (len(readable), len(found), len(keys))


@pytest.mark.timeout(1800 if IS_LONG else 240)
@pytest.mark.parametrize(
    ("kind", "how"),
    [("daemon", "SIGKILL"), ("store", "SIGKILL"), ("daemon", "SIGTERM"), ("store", "close")],
)
def test_owner_that_ends_at_any_moment_brings_its_records_back(kind, how, tmp_path):
    master = start_master("--enable_offload=true", "--default_kv_lease_ttl=1ms")
    store = joined(master.address, 24 * MIB)
    load = Load(store, seed=1)
    waits = random.Random(f"{kind} {how}")
    owner = Owner(kind, master.address, tmp_path)
    try:
        await_owner(load)
        for _ in range(KILLS):
            with load.running():
                time.sleep(waits.uniform(0.05, 0.6))
            before, turns = on_disk(store, list(load.turns)), dict(load.turns)
            with load.running():
                time.sleep(waits.uniform(0, 0.02))
                owner.end(how)
            owner.kill()
            owner = Owner(kind, master.address, tmp_path)
            await_records(load, unchanged(before, turns, load))
            for key in load.removed:
                load.check(key)
            assert load.wrong == []
    finally:
        owner.kill()
        store.close()
        master.stop()


@pytest.mark.timeout(1800 if IS_LONG else 240)
def test_master_with_a_log_that_is_killed_keeps_copies_on_disk(tmp_path):
    flags = ("--enable_offload=true", "--default_kv_lease_ttl=1ms", f"--state_dir={tmp_path}/log")
    master = start_master(*flags)
    store = joined(master.address, 24 * MIB)
    load = Load(store, seed=2)
    waits = random.Random("master")
    (tmp_path / "records").mkdir()
    owner = Owner("store", master.address, tmp_path / "records")
    try:
        await_owner(load)
        for _ in range(KILLS):
            with load.running():
                time.sleep(waits.uniform(0.05, 0.4))
            before, turns = on_disk(store, list(load.turns)), dict(load.turns)
            address = f"--rpc_port={master.port}"
            with load.running():
                time.sleep(waits.uniform(0, 0.02))
                master.process.kill()
                master.process.wait(LIMIT_S)
                master = restarted(master, *flags, address)
            await_records(load, unchanged(before, turns, load))
            for key in load.removed:
                load.check(key)
            assert load.wrong == []
            await_owner(load)
    finally:
        owner.kill()
        store.close()
        master.stop()


def restarted(master: MasterProcess, *flags: str) -> MasterProcess:
    assert master.process.stdout is not None
    master.process.stdout.close()
    return start_master(*flags)


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 MB of its own."""
    image, folder = tmp_path / "image", tmp_path / "device"
    with image.open("wb") as file:
        file.truncate(300 * MIB)
    folder.mkdir()
    makes = shutil.which("mkfs.ext4", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if os.geteuid() != 0 or makes is None:
        pytest.skip("needs root and mkfs.ext4, to make a file system")
    subprocess.run([makes, "-q", "-m", "0", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs root and loop devices, to make a file system: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for block in (MIB, 4096):
            try:
                while file.write(bytes(block)) > 0:
                    pass
            except OSError:
                continue


@pytest.mark.timeout(300)
def test_full_device_stops_no_put_and_is_used_again(small_device):
    master = start_master("--enable_offload=true", "--default_kv_lease_ttl=1ms")
    records = str(small_device / "records")
    Path(records).mkdir()
    store = joined(master.address, 96 * MIB, enable_ssd_offload=True, ssd_offload_path=records)
    foreign = small_device / "foreign"
    try:
        reads = {"hits": 0, "disk": 0}
        total = 2048 if IS_LONG else 768
        for number in range(total):
            if number == total // 4:
                fill(foreign)
            if number == total * 3 // 4:
                foreign.unlink()
            key = f"k{number}"
            assert store.put(key, value_of_mib(number)) == 0, key
            back = number - random.Random(number).randrange(250)
            if back >= 0 and (found := store.get(f"k{back}")) != b"":
                assert found == value_of_mib(back)
                reads["hits"] += 1
                reads["disk"] += back < number - 100
        assert reads["hits"] > total // 4, reads
        assert reads["disk"] > 0, reads

        # Full before the directory is made: nothing can be written there, until there is space.
        store.close()
        shutil.rmtree(records)
        Path(records).mkdir()
        fill(foreign)
        os.truncate(foreign, foreign.stat().st_size - MIB)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", "200MB")
            store = joined(
                master.address, 96 * MIB, enable_ssd_offload=True, ssd_offload_path=records
            )
        for number in range(50):
            assert store.put(f"full{number}", value_of_mib(number)) == 0
        assert on_disk(store, [f"full{number}" for number in range(50)]) == set()
        foreign.unlink()
        begin = time.monotonic()
        numbers = iter(range(1 << 20))

        def is_written() -> bool:
            key = f"space{next(numbers)}"
            assert store.put(key, b"value") == 0
            return key in on_disk(store, [key])

        until(is_written, "nothing is written")
        assert time.monotonic() - begin < 5
    finally:
        store.close()
        master.stop()


def value_of_mib(number: int) -> bytes:
    return number.to_bytes(8, "little") * (MIB // 8)


def test_second_process_on_a_directory_is_told_who_has_it(tmp_path):
    script = (
        "import sys, mooncake\n"
        "config = mooncake.StoreConfig(disk=sys.argv[1], disk_bytes='256MB')\n"
        "mooncake.Store(config=config)\n"
    )
    config = mooncake.StoreConfig(disk=tmp_path, disk_bytes="256MB")
    with mooncake.Store(config=config):
        begin = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ended.returncode != 0
        assert f"{tmp_path} is in use by process {os.getpid()} " in ended.stderr, ended.stderr
        assert time.monotonic() - begin < LIMIT_S
