"""A bounded amount that tenants share: places for sequences, bytes of bodies.

A tenant is given more while it has less than what is free. So one alone may take half, two a third each, and
whoever comes next always finds something free, whatever the others do; no share has to be configured. (These
are the dynamic thresholds of Choudhury and Hahne, 1998, with a factor of one.) Where tenants are not known,
they count as one, which may take all.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """One amount, and what each tenant has taken of it. Owned by the event loop."""

    def __init__(self, total: int, is_shared: bool) -> None:
        """Begin with nothing taken. `is_shared`: tenants are known, and none may take all."""
        self.total = total
        self._is_shared = is_shared
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def take(self, tenant: str, amount: int) -> bool:
        """Return whether `tenant` was given `amount` more; if not, nothing changes. 0 is always given."""
        if not amount:
            return True
        free = self.total - self.num_taken - amount
        if free < 0 or (self._is_shared and self._taken[tenant] > free):
            return False
        self._taken[tenant] += amount
        self.num_taken += amount
        return True

    def give_back(self, tenant: str, amount: int) -> None:
        """Free `amount` of what `tenant` was given."""
        self.num_taken -= amount
        self._taken[tenant] -= amount
        if not self._taken[tenant]:
            del self._taken[tenant]
