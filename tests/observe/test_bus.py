import logging
import threading

from kveik.observe.bus import EventBus
from kveik.observe.events import Preempted, StreamOverrun


def test_listeners_are_called_in_the_order_in_which_they_subscribed():
    bus, heard = EventBus(), []
    for name in "abc":
        bus.subscribe(lambda event, name=name: heard.append((name, event)))
    bus.publish(Preempted("r", "blocks", 40))
    bus.publish(StreamOverrun("r"))
    assert heard == [(name, event) for event in (Preempted("r", "blocks", 40), StreamOverrun("r")) for name in "abc"]


def test_a_listener_that_raises_reaches_neither_the_engine_nor_the_others(caplog):
    bus, heard = EventBus(), []

    def broken(event):
        raise RuntimeError("counter below zero")

    bus.subscribe(broken)
    bus.subscribe(heard.append)
    with caplog.at_level(logging.ERROR):
        for _ in range(50):
            bus.publish(Preempted("r", "blocks", 40))
    assert len(heard) == 50
    assert bus.errors == 50
    # Logged once, with the listener's name and the traceback.
    [record] = caplog.records
    assert "broken" in record.getMessage()
    assert record.exc_info is not None


def test_each_broken_listener_is_logged_once(caplog):
    bus = EventBus()

    class Broken:
        def __call__(self, event):
            raise ValueError

    bus.subscribe(Broken())
    bus.subscribe(Broken())
    for _ in range(3):
        bus.publish(Preempted("r", "blocks", 40))
    assert (bus.errors, len(caplog.records)) == (6, 2)


def test_errors_from_many_threads_are_all_counted():
    bus = EventBus()
    bus.subscribe(lambda event: 1 / 0)
    threads = [
        threading.Thread(target=lambda: [bus.publish(Preempted("r", "blocks", 40)) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bus.errors == 800
