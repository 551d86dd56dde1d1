"""A fixture: the default group of a program with one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rpcdist import collectives


@pytest.fixture
def world_of_one() -> Iterator[None]:
    collectives.init_process_group("tcp", store=collectives.HashStore(), rank=0, world_size=1)
    yield
    collectives.destroy_process_group()
