"""The queue of events."""

from __future__ import annotations

from kvstore.events import Event, EventQueue


def make(number: int) -> Event:
    return Event("stored", (bytes([number]) * 16,), None, "host", "local")


def test_events_come_once_and_in_order() -> None:
    queue = EventQueue()
    for number in range(3):
        queue.emit(make(number))
    assert list(queue.take()) == [make(0), make(1), make(2)]
    assert list(queue.take()) == []


def test_taking_leaves_later_events_to_the_next_call() -> None:
    queue = EventQueue()
    queue.emit(make(0))
    taken = queue.take()
    queue.emit(make(1))
    assert list(taken) == [make(0)]
    assert list(queue.take()) == [make(1)]


def test_a_full_queue_drops_the_oldest_and_counts() -> None:
    queue = EventQueue(limit=2)
    for number in range(5):
        queue.emit(make(number))
    assert queue.dropped == 3
    assert list(queue.take()) == [make(3), make(4)]
    queue.emit(make(5))
    assert queue.dropped == 3
