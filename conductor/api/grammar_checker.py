"""The conductor's door for grammars: what clients ask for, tried out before any node hears of it.

Whether a grammar can be compiled, and followed, is found out in a process beside this one
(`grammar_process.py`), which starts with the first grammar. Its answers are kept, refusals too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from base.errors import InvalidRequestError, RejectedError, UnavailableError, invalid
from base.logs import event
from base.request import MAX_GRAMMAR_CHARS, Grammar, GrammarKind

log = logging.getLogger(__name__)

MAX_KEPT_CHARS = 8 << 20
"""Characters of all grammars whose answers are kept; those asked for longest ago go."""
LEAST_CHARS = 512
"""Characters that each answer is charged with besides: its objects take as much of a short grammar."""
MAX_WAITING = 64
"""Grammars that wait for the process."""
MAX_LINE_BYTES = 16 * MAX_GRAMMAR_CHARS
TRY_S = 15.0
"""The process's own bounds are below it."""
START_S = 60.0


class _EndedError(UnavailableError):
    """The process has ended."""


class GrammarChecker:
    """Owns the process that tries grammars. Belongs to the event loop."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Begin without it. `folder`: the model's, with its tokenizer; token ids are below `vocab_size`."""
        self._arguments = (str(folder), str(vocab_size))
        self._known: OrderedDict[Grammar, Grammar | str] = OrderedDict()
        self._num_chars = 0
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._trying: dict[Grammar, asyncio.Task[Grammar | str]] = {}
        self._unusable = ""
        self.num_tried = 0
        """Grammars that the process was asked about."""

    async def checked(self, asked: Grammar, param: str) -> Grammar:
        """Return a grammar as nodes are to have it.

        Raises:
            InvalidRequestError: there is no such grammar, or it takes too much; `param` names the field.
            RejectedError: too many wait to be tried.
            UnavailableError: nothing can be tried now.
        """
        if len(asked.source) > MAX_GRAMMAR_CHARS:
            raise invalid(param, f"at most {MAX_GRAMMAR_CHARS} characters, not {len(asked.source)}")
        if self._unusable:
            raise InvalidRequestError(self._unusable, param)
        found = self._known.get(asked)
        if found is None:
            # Whoever leaves meanwhile does not cut the exchange with the process off.
            found = await asyncio.shield(self._trying_of(asked))
        else:
            self._known.move_to_end(asked)
        if isinstance(found, str):
            raise invalid(param, found)
        return found

    async def close(self) -> None:
        """End the process."""
        for trying in self._trying.values():
            trying.cancel()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _trying_of(self, asked: Grammar) -> asyncio.Task[Grammar | str]:
        """Return the task that tries a grammar, one for all who ask for it; raises RejectedError."""
        trying = self._trying.get(asked)
        if trying is None:
            if len(self._trying) >= MAX_WAITING:
                raise RejectedError(f"{len(self._trying)} grammars wait to be compiled")
            trying = self._trying[asked] = asyncio.create_task(self._tried(asked))
            trying.add_done_callback(lambda task: self._ended(asked, task))
        return trying

    def _ended(self, asked: Grammar, trying: asyncio.Task[Grammar | str]) -> None:
        del self._trying[asked]
        if not trying.cancelled():
            trying.exception()  # those who wait for it have it, if any still do

    @property
    def pid(self) -> int | None:
        """The process of the moment, if there is one."""
        return self._process.pid if self._process is not None else None

    async def _tried(self, asked: Grammar) -> Grammar | str:
        async with self._turn:
            try:
                table = await self._exchanged(asked)
            except _EndedError:
                # It ended while it had nothing to do: once more.
                table = await self._exchanged(asked)
        self.num_tried += 1
        found = table.get("error") or Grammar(GrammarKind(table["kind"]), table["source"])
        self._keep(asked, found)
        return found

    async def _exchanged(self, asked: Grammar) -> dict[str, str]:
        try:
            process = await self._started()
            assert process.stdin is not None
            line = json.dumps({"kind": asked.kind.value, "source": asked.source})
            process.stdin.write(line.encode() + b"\n")
            async with asyncio.timeout(TRY_S):
                return await _line(process)
        except (OSError, EOFError, ValueError) as error:
            # Whatever it says later would be taken for the answer to the next one.
            await self._end_process()
            event(log, "grammars cannot be tried", level=logging.ERROR, error=repr(error))
            message = "grammars cannot be compiled now; see the conductor's log"
            kind = UnavailableError if isinstance(error, TimeoutError) else _EndedError
            raise kind(message) from None

    async def _started(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        command = (sys.executable, "-m", "conductor.api.grammar_process", *self._arguments)
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES
        )
        async with asyncio.timeout(START_S):
            table = await _line(self._process)
        if "error" in table:
            self._unusable = f"grammars cannot be had with this model: {table['error']}"
            raise InvalidRequestError(self._unusable)
        return self._process

    def _keep(self, asked: Grammar, found: Grammar | str) -> None:
        self._known[asked] = found
        self._num_chars += _num_chars(asked, found)
        while self._num_chars > MAX_KEPT_CHARS:
            oldest, answer = self._known.popitem(last=False)
            self._num_chars -= _num_chars(oldest, answer)


def _num_chars(asked: Grammar, found: Grammar | str) -> int:
    """Return how many characters an answer is charged with."""
    return LEAST_CHARS + len(asked.source) + len(found if isinstance(found, str) else found.source)


async def _line(process: Process) -> dict[str, str]:
    """Return the next line of a process; raises EOFError if it has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise EOFError("the process has ended")
    table: dict[str, str] = json.loads(line)
    return table
