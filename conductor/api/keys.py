"""API keys: whose calls they are, and how many calls a tenant may make.

    {"tenants": {"acme": {"requests_per_s": 5, "burst": 20, "concurrent": 8}},
     "keys": [{"id": "1f0c9a2b", "name": "web", "tenant": "acme", "sha256": "..."}]}

A key is `ck-ID-SECRET`. Only its SHA-256 is kept: the secret has 256 random bits, so a slow
hash would protect nothing that this one does not. The ID finds the record, and the digests
are compared in constant time; for an unknown ID too one comparison is made.

The file is read again when it changes, so keys come and go without a restart; a long one is
read on a thread, and the keys of before are good until then. One that is broken is an error in
the log, and the keys stay as they were.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from base.clock import Clock
from base.errors import ConfigError, RejectedError, UnauthenticatedError
from base.logs import event
from base.private import stamp_of

log = logging.getLogger(__name__)

PREFIX = "ck"
ID = re.compile(r"[!-,.-~]+")
"""Ids by which a key is found: a hyphen ends one, and a header carries no others."""
LOOK_AGAIN_S = 1.0
"""A key that was added or removed counts so much later at most."""
LONG_BYTES = 100_000
"""Longer files, of some 500 keys, are read on a thread: 5,000 keys take 0.1 s."""
BUSY_RETRY_S = 1.0
MAX_QUOTA = 1e9
"""No quota is larger, and no rate slower than one request in so many seconds."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key, as the file has it."""

    id: str
    name: str
    tenant: str
    sha256: str
    operator: bool = False
    """Whether the key opens what is about the cluster too, not one tenant's calls alone."""
    critical: bool = False
    """Whether requests may be of the critical class, which goes before all others."""

    def __post_init__(self) -> None:
        texts = (self.id, self.name, self.tenant)
        flags = (self.operator, self.critical)
        if not all(isinstance(text, str) for text in texts) or {*map(type, flags)} != {bool}:
            raise ValueError(
                f"key {self.id!r}: id, name and tenant are text, operator and critical true or false"
            )
        if len(bytes.fromhex(self.sha256)) != hashlib.sha256().digest_size:
            raise ValueError(f"key {self.id!r}: no SHA-256")


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one tenant with all its keys together; 0: none. Each choice of a call counts."""

    requests_per_s: float = 0.0
    burst: int = 1
    """Requests at once after a rest."""
    concurrent: int = 0

    def __post_init__(self) -> None:
        values = (self.requests_per_s, self.burst, self.concurrent)
        are_good = all(isinstance(value, int | float) and 0 <= value <= MAX_QUOTA for value in values)
        if not are_good or self.burst < 1 or 0 < self.requests_per_s < 1 / MAX_QUOTA:
            raise ValueError(
                f"quotas are numbers, not negative and at most {MAX_QUOTA:g}; a burst is at least 1, and a "
                f"rate that is not 0 at least {1 / MAX_QUOTA:g} a second"
            )


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The contents of the file."""

    tenants: dict[str, Quota]
    keys: tuple[Key, ...]


def made_key(name: str, tenant: str, operator: bool = False, critical: bool = False) -> tuple[Key, str]:
    """Return a key's record, and the key itself, which is kept nowhere."""
    key_id = secrets.token_hex(4)
    secret = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"
    return Key(key_id, name, tenant, _digest(secret), operator, critical), secret


def read_keys(path: Path) -> KeyFile:
    """Read a file of keys; raises ConfigError, which names what is wrong in it."""
    try:
        text = path.read_text()
        table = json.loads(text)
        tenants = {name: Quota(**quota) for name, quota in table["tenants"].items()}
        keys = tuple(Key(**key) for key in table["keys"])
    except OSError as error:
        raise ConfigError(f"server.keys_file: {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"server.keys_file: {path}: {type(error).__name__}: {error}") from error
    known: set[str] = set()
    for number, key in enumerate(keys):
        problem = ""
        if not ID.fullmatch(key.id):
            problem = "an id is visible ASCII characters without -"
        elif key.id in known:
            problem = "another key has this id"
        elif key.tenant not in tenants:
            problem = f"the tenant {key.tenant!r} is not there"
        if problem:
            where = f"server.keys_file: {path}:{_line_of(text, number)}: key {key.id!r}"
            raise ConfigError(f"{where}: {problem}; remove the key and make one with `conductor keys add`")
        known.add(key.id)
    return KeyFile(tenants, keys)


def _line_of(text: str, number: int) -> int:
    """Return the line on which the id of a file's key of this number stands."""
    places = [match.start() for match in re.finditer(r'"id"\s*:\s*"', text)]
    return text.count("\n", 0, places[: number + 1][-1]) + 1 if places else 1


def change_keys(path: Path, changed: Callable[[], KeyFile]) -> None:
    """Replace the file by what `changed` reads and returns, for its owner's eyes only.

    Raises ConfigError while another does so or where there is no folder for it, OSError, and what `changed`
    raises; the file is unchanged then.
    """
    draft = path.with_name(path.name + ".draft")
    try:
        # Exclusive, and before anything is read: what another has changed meanwhile would be undone.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path}: another changes it now; if none does, remove {draft}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w") as out:
            json.dump(dataclasses.asdict(changed()), out, indent=1)
        draft.replace(path)
    except BaseException:
        draft.unlink()
        raise


class TokenBucket:
    """Requests of one tenant: so many a second, so many at once, so many in progress."""

    def __init__(self, quota: Quota, clock: Clock) -> None:
        self.quota = quota
        self._clock = clock
        self._tokens = float(quota.burst)
        self._filled_at_s = clock.now_s()
        self.num_running = 0

    def take(self, tenant: str) -> None:
        """Count a request in; raises RejectedError, which says when to come back."""
        quota = self.quota
        if quota.concurrent and self.num_running >= quota.concurrent:
            raise RejectedError(f"tenant {tenant} has {self.num_running} requests in progress", BUSY_RETRY_S)
        if quota.requests_per_s:
            now_s = self._clock.now_s()
            filled = self._tokens + (now_s - self._filled_at_s) * quota.requests_per_s
            self._tokens, self._filled_at_s = min(float(quota.burst), filled), now_s
            if self._tokens < 1.0:
                retry_s = (1.0 - self._tokens) / quota.requests_per_s
                raise RejectedError(f"tenant {tenant} asks more than its {quota.requests_per_s:g}/s", retry_s)
            self._tokens -= 1.0
        self.num_running += 1

    def take_more(self, tenant: str, count: int) -> None:
        """Count further sequences of a request in; raises RejectedError.

        Their rate is a debt: the requests that follow wait until it is paid.
        """
        quota = self.quota
        if not count:
            return
        if quota.concurrent and self.num_running + count > quota.concurrent:
            raise RejectedError(
                f"tenant {tenant} has {self.num_running} requests in progress, and may have "
                f"{quota.concurrent}: there is no room for {count} choices more",
                BUSY_RETRY_S,
            )
        if quota.requests_per_s:
            self._tokens -= count
        self.num_running += count

    def give_back(self, count: int) -> None:
        self.num_running -= count


class KeyRing:
    """The keys of a running conductor. Owned by the event loop."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Read the file; raises ConfigError."""
        self._path = path
        self._clock = clock
        self._keys: dict[str, Key] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._stamp = stamp_of(path)
        self._looked_at_s = clock.now_s()
        self._is_reading = False
        self._take(read_keys(path))

    def find(self, presented: str) -> Key:
        """Return which `presented` is; raises UnauthenticatedError."""
        self._look_again()
        prefix, _, rest = presented.partition("-")
        found = self._keys.get(rest.partition("-")[0]) if prefix == PREFIX else None
        expected = found.sha256 if found is not None else "0" * 64
        if not hmac.compare_digest(_digest(presented), expected) or found is None:
            raise UnauthenticatedError("a valid API key is wanted: Authorization: Bearer ck-...")
        return found

    @contextmanager
    def request(self, key: Key) -> Iterator[Callable[[int], None]]:
        """Count a request with `key` in its tenant's quota; raises RejectedError where that is used up.

        Yields what counts more sequences of the request, such as choices, and raises RejectedError too.
        """
        bucket = self._buckets[key.tenant]
        bucket.take(key.tenant)
        try:
            with self.more(key) as charge:
                yield charge
        finally:
            bucket.give_back(1)

    @contextmanager
    def more(self, key: Key) -> Iterator[Callable[[int], None]]:
        """Yield what counts more sequences of a request that is counted, and raises RejectedError."""
        bucket, num_taken = self._buckets[key.tenant], 0

        def charge(count: int) -> None:
            nonlocal num_taken
            bucket.take_more(key.tenant, count)
            num_taken += count

        try:
            yield charge
        finally:
            bucket.give_back(num_taken)

    def _look_again(self) -> None:
        now_s = self._clock.now_s()
        if self._is_reading or now_s - self._looked_at_s < LOOK_AGAIN_S:
            return
        self._looked_at_s = now_s
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None or stamp[2] <= LONG_BYTES:
            self._take_again(partial(read_keys, self._path))
        else:
            self._is_reading = True
            reading = asyncio.get_running_loop().run_in_executor(None, read_keys, self._path)
            reading.add_done_callback(lambda done: self._take_again(done.result))

    def _take_again(self, read: Callable[[], KeyFile]) -> None:
        self._is_reading = False
        try:
            self._take(read())
            event(log, "keys read again", keys=len(self._keys))
        except ConfigError as error:
            event(log, "keys not read again", level=logging.ERROR, reason=error)

    def _take(self, file: KeyFile) -> None:
        self._keys = {key.id: key for key in file.keys}
        for tenant, quota in file.tenants.items():
            if tenant in self._buckets:
                self._buckets[tenant].quota = quota
            else:
                self._buckets[tenant] = TokenBucket(quota, self._clock)
        for tenant in self._buckets.keys() - file.tenants.keys():
            if not self._buckets[tenant].num_running:
                del self._buckets[tenant]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
