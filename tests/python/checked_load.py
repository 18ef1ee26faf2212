"""Clients that put, get and remove, and check each answer against what was acknowledged before."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

from conftest import MIB

import mooncake

KEYS = 100
SIZE = 4096
# A removal that took longer may have been repeated at the next master, which knows nothing of the
# first attempt: its answer is that there is no such object.
REPEATED_S = 0.1
# Longer than any fault of the tests lasts: a call that fails would hide what the next one sees.
RETRY_S = 50


def value(key: str, version: int) -> bytes:
    """Return bytes that no other key and no other version has."""
    word = f"{key} {version};".encode()
    return (word * (SIZE // len(word) + 1))[:SIZE]


@dataclass
class Client:
    """A store, its keys, and for each key the versions that it may have; 0: it is absent."""

    store: mooncake.Store
    name: str
    seed: str
    states: dict[str, set[int]] = field(default_factory=dict)
    versions: int = 0
    calls: int = 0
    longest_s: dict[str, float] = field(default_factory=dict)
    """By verb."""
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended: float = 0
    """When the last call ended."""

    def run(self, is_over: threading.Event) -> None:
        chance = random.Random(self.seed)
        keys = [f"{self.name}-{number}" for number in range(KEYS)]
        self.states = {key: {0} for key in keys}
        while not is_over.is_set():
            self.call(chance.choice(keys), chance.choice(("put", "overwrite", "get", "remove")))

    def call(self, key: str, verb: str) -> None:
        begun = time.monotonic()
        before = self.states[key]
        try:
            self.states[key] = getattr(self, verb)(key)
        except mooncake.MooncakeError as error:
            self.failures.append(f"{verb} {key} {time.monotonic() - begun:.3f} s: {error!r}")
            outcome = {"put": {self.versions}, "overwrite": {self.versions}, "remove": {0}}
            self.states[key] = before | outcome.get(verb, set())
        self.ended = time.monotonic()
        self.calls += 1
        self.longest_s[verb] = max(self.longest_s.get(verb, 0), self.ended - begun)

    def put(self, key: str) -> set[int]:
        self.versions += 1
        if self.store.put(key, value(key, self.versions)):
            self.expect(key, "put stores", 0 in self.states[key])
            return {self.versions}
        self.expect(key, "put keeps", self.states[key] != {0})
        return self.states[key] - {0}

    def overwrite(self, key: str) -> set[int]:
        self.versions += 1
        self.expect(
            key, "overwrite", self.store.put(key, value(key, self.versions), overwrite=True)
        )
        return {self.versions}

    def get(self, key: str) -> set[int]:
        found = self.store.get(key, None)
        possible = {
            version
            for version in self.states[key]
            if found == (value(key, version) if version else None)
        }
        self.expect(key, f"get finds {found and found[:32]!r}", bool(possible))
        return possible or self.states[key]

    def remove(self, key: str) -> set[int]:
        begun = time.monotonic()
        try:
            self.store.delete(key, force=True)
        except mooncake.NotFoundError:
            may_be_repeated = time.monotonic() > begun + REPEATED_S
            self.expect(key, "remove finds nothing", may_be_repeated or 0 in self.states[key])
        else:
            self.expect(key, "remove finds it", self.states[key] != {0})
        return {0}

    def expect(self, key: str, seen: str, is_possible: bool) -> None:
        if not is_possible:
            self.wrong.append(f"{seen}: {key} has one of {sorted(self.states[key])}")


class Load:
    """Clients in threads, each with memory in the pool, which work until the block ends.

    At the end of the block every key is read once more. An answer that contradicts what was
    acknowledged fails the test; calls that failed are for the test to judge.
    """

    def __init__(
        self,
        place: str,
        *,
        clients: int = 3,
        retry_s: float | None = RETRY_S,
        seed: int | None = None,
    ) -> None:
        self.seed = random.randrange(1 << 32) if seed is None else seed
        self.is_over = threading.Event()
        config = mooncake.StoreConfig(
            segment_bytes=32 * MIB, retry_s=retry_s, rpc_timeout_s=retry_s
        )
        self.clients = [
            Client(mooncake.Store(place, config), f"{self.seed}-{number}", f"{self.seed} {number}")
            for number in range(clients)
        ]
        runs = [(client.run, (self.is_over,)) for client in self.clients]
        self.threads = [threading.Thread(target=run, args=args, daemon=True) for run, args in runs]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(90)
        hanging = [thread.name for thread in self.threads if thread.is_alive()]
        if kind is None and not hanging:
            for client in self.clients:
                for key in client.states:
                    client.call(key, "get")
        for client in self.clients:
            client.store.close()
        if kind is None:
            assert not hanging, f"calls do not end: seed {self.seed}"
            assert not self.wrong, f"seed {self.seed}: {self.wrong}"

    @property
    def wrong(self) -> list[str]:
        """Answer that contradict what was acknowledged."""
        return [text for client in self.clients for text in client.wrong]

    @property
    def failures(self) -> list[str]:
        return [text for client in self.clients for text in client.failures]

    def take_longest(self) -> dict[str, float]:
        """Return the duration of the longest call by verb since the last question."""
        longest: dict[str, float] = {}
        for client in self.clients:
            for verb, took in client.longest_s.items():
                longest[verb] = max(took, longest.get(verb, 0))
            client.longest_s = {}
        return longest

    def await_calls(self, count: int, within_s: float = 60) -> None:
        """Wait until each client has made so many more calls."""
        wanted = [client.calls + count for client in self.clients]
        deadline = time.monotonic() + within_s
        while any(c.calls < least for c, least in zip(self.clients, wanted, strict=True)):
            assert time.monotonic() < deadline, f"seed {self.seed}: {self.failures} {self.wrong}"
            time.sleep(0.02)
