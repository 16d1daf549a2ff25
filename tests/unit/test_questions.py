"""Work that goes on though whoever asked for it has gone."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from ckptd.errors import NotFound
from ckptd.questions import unattended


async def fails() -> None:
    await asyncio.sleep(0)
    raise NotFound("nothing of that name")


def test_what_fails_when_all_who_waited_for_it_have_gone_is_no_complaint_of_the_loop() -> None:
    complaints: list[dict[str, Any]] = []

    async def waits() -> None:
        await asyncio.shield(unattended(fails()))

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        caller = asyncio.create_task(waits())
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(run())
    assert not complaints


def test_who_is_still_there_gets_what_was_raised() -> None:
    async def run() -> None:
        with pytest.raises(NotFound):
            await asyncio.shield(unattended(fails()))

    asyncio.run(run())
