"""A directory in Redis that says when it has been brought up to date."""

import asyncio

from kvstore.directory import RedisDirectory


class FlushedDirectory(RedisDirectory):
    """Counts the rounds of `run`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._settled = asyncio.Event()
        self._num_begun = self._num_settled = 0

    @property
    def num_waiting(self):
        """Changes that Redis does not know of."""
        return len(self._outbox)

    async def flush(self):
        """Return when what was published before is known to all, or cannot be for now."""
        wanted = self._num_begun + 1  # a round under way may be past what was published last
        while self._num_settled < wanted:
            self._settled.clear()
            self._has_news.set()
            await self._settled.wait()

    async def _carry(self):
        self._num_begun += 1
        await super()._carry()

    async def _wait_for_news(self, wait_s):
        self._num_settled = self._num_begun
        self._settled.set()
        await super()._wait_for_news(wait_s)
