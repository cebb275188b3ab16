"""How fake engines answer a submit: scripts, which are coroutines over a `Call`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice.wire.errors import Fault, FinishReason
from sluice.wire.requests import Submit
from sluice.wire.rows import End, Started, TextRow, Times

if TYPE_CHECKING:
    from tests.fakes.ring_peers import FakeEngine

TIMES = Times(0.25, 0.5, 0.75)


def end(reason: FinishReason, **fields) -> End:
    return End(reason, TIMES, **fields)


@dataclass
class Call:
    """A submit that a fake engine has received, with methods to answer it."""

    submit: Submit
    engine: FakeEngine
    cancelled: set[int] = field(default_factory=set)
    """Sequences that were cancelled."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all sequences were cancelled."""

    async def send(self, *rows: TextRow, start: bool = False, cached: int = 0) -> None:
        submit = self.submit
        started = [Started(submit.request, submit.attempt, len(submit.prompt), cached)] if start else []
        await self.engine.ring.detokenizers[submit.detokenizer].send(submit.router, started, list(rows))

    def row(self, offset, tokens, text="", sequence=0, end=None, logprobs=()) -> TextRow:
        return TextRow(
            self.submit.request, self.submit.attempt, sequence, offset, list(tokens), list(logprobs), text, end
        )


Script = Callable[[Call], Coroutine[Any, Any, None]]


def token_at(submit: Submit, sequence: int, offset: int) -> int:
    return (sum(submit.prompt) + 31 * sequence + 7 * offset) % 4000


def text_of(tokens) -> str:
    return "".join(f"<{token}>" for token in tokens)


async def generate(call: Call, pause: float = 0.0, most: int = 24) -> None:
    """Send up to `most` tokens per sequence, one per row. Sequences end with LENGTH, with HANDED_OVER if the submit
    hands over, or with ABORTED if cancelled.

    Tokens that the submit resumes from are skipped: a token depends only on prompt, sequence and offset.
    """
    submit = call.submit
    length = min(submit.stopping.max_tokens, most)
    reason = FinishReason.HANDED_OVER if submit.stopping.hands_over else FinishReason.LENGTH
    await call.send(start=True, cached=len(submit.prompt) // 2)
    resumed = {sequence: len(submit.resume.get(sequence, ())) for sequence in range(submit.n)}
    live = set(resumed).difference(submit.ended)
    complete = [sequence for sequence in sorted(live) if resumed[sequence] >= length]
    if complete:
        await call.send(*(call.row(resumed[i], [], "", i, end(FinishReason.LENGTH)) for i in complete))
    live.difference_update(complete)
    for offset in range(length):
        rows = []
        for sequence in sorted(live):
            if offset < resumed[sequence]:
                continue
            if sequence in call.cancelled:
                rows.append(call.row(offset, [], "", sequence, end(FinishReason.ABORTED)))
                live.discard(sequence)
                continue
            token = token_at(submit, sequence, offset)
            last = end(reason) if offset == length - 1 else None
            rows.append(call.row(offset, [token], text_of([token]), sequence, last))
        if rows:
            await call.send(*rows)
        if not live:
            return
        if pause and rows:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await call.stopped.wait()


async def hang(call: Call) -> None:
    """Send no tokens. Once cancelled, end every sequence with ABORTED."""
    await call.send(start=True)
    await call.stopped.wait()
    await call.send(*(call.row(0, [], "", i, end(FinishReason.ABORTED)) for i in range(call.submit.n)))


async def refuse(call: Call, fault: Fault) -> None:
    """End every sequence with this fault."""
    await call.send(
        *(call.row(0, [], "", i, end(FinishReason.ERROR, fault=fault)) for i in range(call.submit.n)), start=True
    )
