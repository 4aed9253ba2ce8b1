from __future__ import annotations

import gc
import logging
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_sentry.errors import Refusal
from ckpt_sentry.formats.step import find_step
from ckpt_sentry.patching import guard
from ckpt_sentry.patching.patches import Patch


@pytest.fixture
def production(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SENTRY_GUARD", "swallow")
    monkeypatch.setattr(guard, "_said", set())


def failing(point: str = "test.point", default: Any = None, error: BaseException | None = None) -> Callable[..., Any]:
    @guard.contained(point, default)
    def function(*_: object, **__: object) -> Any:
        raise error if error is not None else ValueError("ours")

    return function


def test_under_pytest_errors_are_raised() -> None:
    with pytest.raises(ValueError, match="ours"):
        failing()()


def test_in_the_tests_of_a_host_errors_are_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "under_test", False)
    assert failing(default=7)() == 7


@pytest.mark.usefixtures("production")
def test_in_production_the_default_is_returned_and_the_error_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ckpt_sentry")
    assert failing()(1, key=2) is None
    assert failing(default=7)() == 7
    text = "ckpt_sentry: own error in test.point, the job goes on without this part: ValueError: ours"
    assert [(record.levelname, record.name) for record in caplog.records] == [
        ("WARNING", "ckpt_sentry"),
        ("DEBUG", "ckpt_sentry"),
        ("DEBUG", "ckpt_sentry"),
    ]
    assert caplog.records[0].getMessage() == text
    assert caplog.records[1].exc_info is not None


@pytest.mark.usefixtures("production")
def test_where_the_host_does_not_listen_the_error_is_seen_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("ckpt_sentry")
    logger.propagate = False
    try:
        failing()()
        failing()()
    finally:
        logger.propagate = True
    text = "ckpt_sentry: own error in test.point, the job goes on without this part: ValueError: ours\n"
    assert capsys.readouterr().err == text


@pytest.mark.usefixtures("production")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_the_hosts_passes(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        failing(error=kind())()


@pytest.mark.usefixtures("production")
def test_a_refusal_passes() -> None:
    with pytest.raises(Refusal, match="on purpose"):
        failing(error=Refusal("on purpose"))()


@pytest.mark.usefixtures("production")
@pytest.mark.parametrize("name", ["strict", "log"])
def test_holds_with_its_own_functions_broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function = failing(default=7)

    def broken(*_: object) -> None:
        raise OSError(name)

    monkeypatch.setattr(guard, name, broken)
    assert function() == 7


def test_keeps_name_arguments_and_result() -> None:
    @guard.contained("test.point")
    def add(left: int, *, right: int) -> int:
        """Add."""
        return left + right

    assert (add.__name__, add.__doc__, add(1, right=2)) == ("add", "Add.", 3)


class TestAround:
    """
    A host function watched from outside.
    """

    def watched(
        self, function: Callable[..., Any], before: Any = "state"
    ) -> tuple[Callable[..., Any], Patch, list[Any]]:
        seen: list[Any] = []

        def on_entry(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append((original, args, kwargs))
            return before

        wrap = guard.around(on_entry, lambda state, error: seen.append((state, error)))
        patch = Patch(object, "any", function)
        return wrap(function, patch), patch, seen

    def test_sees_arguments_and_end(self) -> None:
        def host(*args: int, **kwargs: int) -> tuple[Any, ...]:
            return args, kwargs

        call, _, seen = self.watched(host)
        assert call(1, a=2) == ((1,), {"a": 2})
        assert seen == [(host, (1,), {"a": 2}), ("state", None)]

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
    def test_passes_the_very_exception(self, kind: type[BaseException]) -> None:
        raised = kind("theirs")

        def host() -> None:
            raise raised

        call, _, seen = self.watched(host)
        with pytest.raises(kind) as caught:
            call()
        assert caught.value is raised
        assert seen[-1] == ("state", raised)

    def test_an_unwatched_call_passes(self) -> None:
        call, _, seen = self.watched(lambda: 1, before=None)
        assert call() == 1
        assert len(seen) == 1

    def test_after_uninstall_it_watches_no_more(self) -> None:
        call, patch, seen = self.watched(lambda: 1)
        patch.active = False
        assert call() == 1
        assert seen == []


class TooLongError(Exception):
    pass


def takes_the_frame(_number: int, _frame: object) -> None:
    raise TooLongError


def takes_anything(*_: object, kind: type[Exception] = TooLongError) -> None:
    raise kind


class Limit:
    def __call__(self, _number: int, _frame: object) -> None:
        raise TimeoutError


@pytest.fixture(params=[takes_the_frame, takes_anything, Limit()], ids=["frame", "anything", "method"])
def signalled(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """
    A function amid which a signal comes whose handler raises.
    """
    before = signal.signal(signal.SIGUSR1, request.param)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("production")
def test_what_a_signal_handler_raises_passes(signalled: Callable[[], None]) -> None:
    with pytest.raises((TooLongError, TimeoutError)):
        guard.contained("test.point")(signalled)()


def test_nobody_swallows_what_a_signal_handler_raises(signalled: Callable[[], None]) -> None:
    def swallow() -> None:
        try:
            signalled()
        except Exception as error:
            guard.let_through(error)

    with pytest.raises((TooLongError, TimeoutError)):
        swallow()


def test_what_no_signal_handler_raises_is_not_let_through() -> None:
    def given(_number: int, _frame: object) -> None:
        raise TooLongError

    for arguments in ((1, None), (None, sys._getframe()), (1, sys._getframe().f_back)):
        try:
            given(*arguments)
        except TooLongError as error:
            guard.let_through(error)


def test_what_was_let_through_keeps_nothing_alive(tmp_path: Path) -> None:
    class Held:
        pass

    def look(held: Held) -> None:
        assert held
        assert find_step(tmp_path) is None

    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        look(held)
        del held
        assert gone() is None
    finally:
        gc.enable()
