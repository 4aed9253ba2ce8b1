from __future__ import annotations

import _thread
import ctypes
import os
import threading
import time
from queue import Queue

import pytest

from ckpt_sentry.core.report import Identity
from ckpt_sentry.session import stall
from ckpt_sentry.transport.events import LoadStalled

ME = Identity("run7-a1b2", rank=1, world_size=2, node="node0", pid=7)
WAIT = 10.0


@pytest.fixture(autouse=True)
def _nothing_open() -> None:
    stall._standings.clear()
    stall._over.clear()


def test_a_load_under_way_tells_phase_time_and_stack() -> None:
    stall.stand("a", "plan")
    event = stall.stalled(ME, "a", since=1.0)
    assert event is not None
    assert (event.phase, event.since) == ("plan", stall._standings["a"].since)
    frame, code = event.stack.splitlines()[-2:]
    assert frame.endswith("in test_a_load_under_way_tells_phase_time_and_stack")
    assert code == '  event = stall.stalled(ME, "a", since=1.0)'


def test_a_process_away_from_the_load_shows_its_main_thread() -> None:
    event = stall.stalled(ME, "a", since=1.0)
    assert event is not None
    assert (event.phase, event.since) == (None, 1.0)
    assert "in test_a_process_away_from_the_load_shows_its_main_thread" in event.stack


def test_a_process_that_is_through_says_nothing() -> None:
    stall.stand("a", "plan")
    stall.leave("a")
    assert stall.stalled(ME, "a", since=1.0) is None


def test_leaving_what_was_never_entered_is_nothing() -> None:
    stall.leave("a")
    assert stall.stalled(ME, "a", since=1.0) is not None


def test_a_thread_that_is_blocked_in_native_code_can_be_seen() -> None:
    pipe = ctypes.CDLL(None)
    begun, over = threading.Event(), threading.Event()

    def block_in_libc() -> None:
        stall.stand("a", "read")
        begun.set()
        while not over.is_set():
            pipe.usleep(50_000)

    thread = threading.Thread(target=block_in_libc)
    thread.start()
    begun.wait(WAIT)
    event = stall.stalled(ME, "a", since=1.0)
    over.set()
    thread.join()
    assert event is not None
    assert event.stack.splitlines()[-1].endswith("in block_in_libc") or "in block_in_libc" in event.stack


def test_a_deep_stack_is_cut_at_the_outer_end() -> None:
    def down(depth: int) -> str:
        return stall.stack_of(threading.get_ident()) if depth == 0 else down(depth - 1)

    rows = [row for row in down(100).splitlines() if row.startswith("File")]
    assert len(rows) == stall.MOST_FRAMES
    assert all(row.endswith("in down") for row in rows)


def test_an_unknown_thread_has_no_stack() -> None:
    assert stall.stack_of(None) == ""
    assert stall.stack_of(-1) == ""


def ends(threads: int) -> bool:
    """
    Whether there are only so many threads left, now or soon.
    """
    until = time.monotonic() + WAIT
    while _thread._count() > threads and time.monotonic() < until:
        os.sched_yield()
    return _thread._count() <= threads


def test_the_alarm_rings_once_a_load_lasts_too_long_and_its_thread_ends() -> None:
    rung: Queue[LoadStalled] = Queue()
    stall.stand("a", "read")
    threads = _thread._count()
    stall.Alarm(ME, "a", 0.01, rung.put)
    event = rung.get(timeout=WAIT)
    assert (event.load_id, event.phase) == ("a", "read")
    assert ends(threads)


def test_a_good_load_leaves_no_thread() -> None:
    rung: Queue[LoadStalled] = Queue()
    threads = _thread._count()
    alarm = stall.Alarm(ME, "a", 3600.0, rung.put)
    alarm.cancel()
    alarm.cancel()
    assert ends(threads)
    assert rung.empty()


def test_a_wait_longer_than_the_platform_can_is_no_error() -> None:
    alarm = stall.Alarm(ME, "a", 1e300, Queue().put)
    alarm.cancel()


def test_an_alarm_for_a_load_that_has_just_ended_is_silent() -> None:
    rung: Queue[LoadStalled] = Queue()
    stall.stand("a", "read")
    stall.leave("a")
    alarm = stall.Alarm(ME, "a", 3600.0, rung.put)
    alarm._expire()
    alarm.cancel()
    assert rung.empty()


def test_without_a_launcher_there_is_no_connection() -> None:
    assert stall.connect() is None


def test_loads_that_follow_each_other_share_a_thread_that_ends_with_them() -> None:
    rung: Queue[LoadStalled] = Queue()
    threads = _thread._count()
    most = 0
    for number in range(200):
        alarm = stall.Alarm(ME, str(number), 3600.0, rung.put)
        most = max(most, _thread._count())
        alarm.cancel()
    assert most <= threads + 2
    assert ends(threads)
    assert rung.empty()


def test_of_several_loads_each_rings_by_itself() -> None:
    rung: Queue[LoadStalled] = Queue()
    threads = _thread._count()
    for name, seconds in (("late", 3600.0), ("soon", 0.01), ("sooner", 0.001)):
        stall.stand(name, "read")
        stall.Alarm(ME, name, seconds, rung.put)
    assert {rung.get(timeout=WAIT).load_id for _ in range(2)} == {"soon", "sooner"}
    stall._watch.remove(next(iter(stall._watch._alarms)))
    assert ends(threads)
