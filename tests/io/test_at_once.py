"""Calls in threads: results in order, a maximum number at a time, and errors in the place of their results."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from ckptmove.io.at_once import Workers, at_once, go_on


@pytest.mark.parametrize("jobs", [1, 2, 5, 40])
def test_results_are_in_the_order_of_the_items(jobs):
    assert [*at_once(lambda item: item * item, range(20), jobs)] == [item * item for item in range(20)]


def test_nothing_to_do():
    assert [*at_once(print, [], 3)] == []


def test_calls_run_at_the_same_time():
    meeting = threading.Barrier(3, timeout=60)
    assert len([*at_once(lambda _: meeting.wait(), range(3), 3)]) == 3


def test_items_are_taken_as_calls_return():
    taken = []

    def items():
        for item in range(9):
            taken.append(item)
            yield item

    results = at_once(str, items(), 2)
    assert (next(results), taken) == ("0", [0, 1, 2])


def test_an_error_is_raised_in_its_place():
    results = at_once(lambda item: 6 // item, [2, 3, 0, 1], 2)
    assert [next(results), next(results)] == [3, 2]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize("jobs", [1, 3, 40])
def test_workers_call_each_item_once(jobs):
    called = []
    Workers(range(20)).run(called.append, jobs)
    assert sorted(called) == [*range(20)]


def test_a_call_goes_on_after_the_last_item():
    """The other thread finds no item left meanwhile."""
    called = []

    def call(item):
        for _ in range(100):
            time.sleep(0.001)  # the other thread finds no item meanwhile
            go_on()
        called.append(item)

    Workers([1]).run(call, 2)
    assert called == [1]


def test_what_makes_the_items_may_fail():
    def items():
        yield 1
        raise ValueError("no item")

    with pytest.raises(ValueError, match="no item"):
        Workers(items()).run(lambda _: None, 2)


def test_the_first_error_stops_all_workers():
    started, called = threading.Barrier(2, timeout=60), []
    go_on()  # this thread is not one of them

    def call(item):
        called.append(item)
        started.wait()
        if item == 0:
            raise ValueError(item)
        while True:
            go_on()

    with pytest.raises(ValueError, match="0"):
        Workers([0, 1, 2, 3]).run(call, 2)
    assert sorted(called) == [0, 1]


def test_an_interruption_waits_for_all_calls():
    """A second Ctrl-C comes while the threads are waited for."""
    script = """
import os, signal, threading, time
from ckptmove.io.at_once import Workers

started, interrupted, ended = threading.Barrier(3), threading.Event(), []

def call(item):
    started.wait()
    interrupted.wait()
    # The main thread has seen the last interruption.
    time.sleep(0.3)
    ended.append(item)

def interrupt():
    started.wait()
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        # The main thread has begun to wait again.
        time.sleep(0.05)
    interrupted.set()

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt).start()
try:
    Workers([1, 2]).run(call, 2)
except KeyboardInterrupt:
    print(len(ended))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "2\n"
