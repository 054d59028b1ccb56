from __future__ import annotations

from threading import Barrier, Event, Lock, Timer

import pytest

from ckptmove.cli.ahead import Ahead


def test_results_come_in_order_from_calls_at_once() -> None:
    met = Barrier(3, timeout=10)

    def call(number):
        met.wait()
        return number * number

    ahead = Ahead(call, range(6), 3)
    assert [ahead.take() for _ in range(6)] == [0, 1, 4, 9, 16, 25]


def test_only_so_many_run_ahead() -> None:
    lock, started = Lock(), []

    def call(number):
        with lock:
            started.append(number)

    ahead = Ahead(call, range(10), 2)
    for taken in range(1, 11):
        ahead.take()
        assert len(started) <= taken + 2


def test_an_error_belongs_to_its_request() -> None:
    def call(number):
        if number == 1:
            raise ValueError(number)
        return number

    ahead = Ahead(call, range(3), 2)
    assert ahead.take() == 0
    with pytest.raises(ValueError, match="1"):
        ahead.take()
    assert ahead.take() == 2


def test_results_come_as_calls_end() -> None:
    first = Barrier(2, timeout=10)

    def call(number):
        if number == 0:
            first.wait()
        if number == 3:
            raise ValueError(number)
        return number * number

    ahead = Ahead(call, range(5), 2)
    order = []
    for number in ahead.as_completed():
        order.append(number)
        if number == 3:
            with pytest.raises(ValueError, match="3"):
                ahead.take()
        else:
            assert ahead.take() == number * number
        if number == 4:
            first.wait()
    assert order == [1, 2, 3, 4, 0]


def test_a_call_takes_longer_than_one_wait(monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.cli.ahead._SECONDS", 0.001)
    may_end = Event()
    Timer(0.1, may_end.set).start()
    ahead = Ahead(may_end.wait, [10], 1)
    assert [(number, ahead.take()) for number in ahead.as_completed()] == [(10, True)]


def test_a_result_takes_longer_than_one_wait(monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.cli.ahead._SECONDS", 0.001)
    may_end = Event()
    Timer(0.1, may_end.set).start()
    assert Ahead(may_end.wait, [10], 1).take()
