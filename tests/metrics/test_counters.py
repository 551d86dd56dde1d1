"""Counts of calls: what gets a label, how many labels there are at most, and that no call is lost."""

from __future__ import annotations

import threading

import pytest

from rpcdist._counters import BUCKET_BOUNDS, MAX_ERRORS, MAX_NAMES, OK, OTHER, EndedCall, Histograms, call_histograms
from rpcdist.metrics import Histogram


def noted(counts: Histograms[EndedCall], called: object, outcome: str = OK, age_s: float = 0.0) -> None:
    counts.note((1, 2, called, 0.0, age_s, outcome, 0.0))


def numbers(counts: Histograms[EndedCall]) -> dict[tuple[str, ...], int]:
    return {key: sum(histogram.counts) for key, histogram in counts.histograms().items()}


def test_calls_are_counted_by_function_and_error() -> None:
    counts = call_histograms(are_peers_names=False)
    for _ in range(3):
        noted(counts, "module:function")
    noted(counts, "module:function", "KeyError: 'x'")
    noted(counts, "module:other", "DeadlineExceeded")
    noted(counts, object())
    assert numbers(counts) == {
        ("module:function", ""): 3,
        ("module:function", "KeyError"): 1,
        ("module:other", "DeadlineExceeded"): 1,
        ("to_here()", ""): 1,
    }


def test_a_name_that_a_peer_made_up_gets_no_label() -> None:
    counts = call_histograms(are_peers_names=True)
    for number in range(1000):
        noted(counts, f"made:up{number}", "UnknownFunction: there is none")
    noted(counts, "real:function")
    noted(counts, "real:function", "KeyError: 'x'")
    assert numbers(counts) == {
        (OTHER, "UnknownFunction"): 1000,
        ("real:function", ""): 1,
        ("real:function", "KeyError"): 1,
    }


def test_the_number_of_labels_is_bounded() -> None:
    counts = call_histograms(are_peers_names=True)
    for number in range(3 * MAX_NAMES):
        noted(counts, f"m:f{number}")
        noted(counts, "m:f0", f"Error{number}: text")
    found = numbers(counts)
    assert len({name for name, _ in found} - {OTHER}) == MAX_NAMES
    assert len({error for _, error in found} - {"", OTHER}) == MAX_ERRORS
    assert sum(found.values()) == 6 * MAX_NAMES


@pytest.mark.parametrize("error", ["", "x" * 300, "no identifier", 'E"}\n# evil 1'])
def test_an_error_that_is_no_name_gets_no_label(error: str) -> None:
    counts = call_histograms(are_peers_names=False)
    noted(counts, "m:f", f"{error}: text")
    assert numbers(counts) == {("m:f", OTHER): 1}


def test_durations_fall_into_their_buckets() -> None:
    histogram = Histogram()
    for time_s in (0.0, *BUCKET_BOUNDS, 1000.0):
        histogram.add(time_s)
    assert histogram.counts == [2, *[1] * len(BUCKET_BOUNDS)]  # a bound belongs to its own bucket
    assert histogram.total_s == pytest.approx(sum(BUCKET_BOUNDS) + 1000)


def test_what_is_read_does_not_change_and_includes_the_last_call() -> None:
    counts = call_histograms(are_peers_names=False)
    noted(counts, "m:f", age_s=0.3)
    before = counts.histograms()
    noted(counts, "m:f")
    assert [sum(each.counts) for each in before.values()] == [1]
    [histogram] = before.values()
    assert 0.3 <= histogram.total_s < 5
    assert numbers(counts) == {("m:f", ""): 2}


def test_no_call_of_many_threads_is_lost() -> None:
    seen: list[float] = []
    counts = call_histograms(False, lambda name, error, time_s: seen.append(time_s))

    def many() -> None:
        for _ in range(5000):
            noted(counts, "m:f")

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        counts.histograms()
    for thread in threads:
        thread.join()
    assert numbers(counts) == {("m:f", ""): 20_000} and len(seen) == 20_000


def test_a_call_that_ends_while_somebody_reads_waits_for_nobody() -> None:
    """A signal's handler may end a call on the thread that holds the lock."""
    counts = call_histograms(are_peers_names=False)
    with counts._lock:
        for _ in range(1000):
            noted(counts, "m:f")
    assert numbers(counts) == {("m:f", ""): 1000}
