from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.checkpoint  # noqa: F401 - the hooks wait for it
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from ckpt_sentry import integrations
from ckpt_sentry.integrations.dcp.exceptions import portable, without_code
from ckpt_sentry.patching import ledger
from ckpt_sentry.session.exceptions import keep_text, text_of

MOST_BYTES = 10_000_000
MOST_LINES = 60
SECONDS = 2.0


@pytest.fixture(autouse=True)
def watched(fresh_hooks: Iterator[None]) -> None:  # noqa: ARG001
    ledger.install(integrations.seams())


def deep(levels: int, text: str) -> None:
    if levels:
        deep(levels - 1, text)
    raise RuntimeError(f"Missing key in checkpoint state_dict: model.adapter{text}.")


def failure(text: str = "0") -> Any:
    try:
        deep(8, text)
    except RuntimeError as error:
        return _wrap_exception(error)


def gathered(ranks: int, distinct: int) -> dict[int, Any]:
    """
    What the coordinator has of each rank: its own object, and one unpickled for each other rank.
    """
    sent = [pickle.dumps(failure(str(number))) for number in range(distinct)]
    return {0: failure(), **{rank: pickle.loads(sent[rank % distinct]) for rank in range(1, ranks)}}


@pytest.mark.parametrize("ranks", [1, 4, 64, 4096])
@pytest.mark.parametrize("distinct", [1, 3])
def test_what_is_scattered_and_printed_grows_with_distinct_failures(ranks: int, distinct: int) -> None:
    failures = gathered(ranks, distinct)
    began = time.process_time()
    error = CheckpointException("plan", failures)
    # As torch does: a message for each rank, each pickled (distributed_c10d.py, `scatter_object_list`).
    sent = [pickle.dumps(one, 4) for one in [error] * ranks]
    received = pickle.loads(sent[-1])
    text = str(received)
    spent = time.process_time() - began

    assert sum(map(len, sent)) <= MOST_BYTES
    assert text.count("\n") <= MOST_LINES
    assert spent <= SECONDS
    assert type(received) is CheckpointException
    assert received.args[0] == "plan"
    assert received.args[1] is received.failures
    assert list(received.failures) == list(failures)
    for rank, (inner, stack) in received.failures.items():
        assert (type(inner), inner.args) == (RuntimeError, failures[rank][0].args)
        assert len(stack) == len(failures[rank][1])


def test_gathered_failures_are_printed_once() -> None:
    text = str(CheckpointException("read", gathered(4096, 1)))

    assert text.count("\nRuntimeError: Missing key") == 1
    assert "(RANK 0, the same on 0-4095)" in text


def test_the_message_is_read_where_this_package_is_not_installed() -> None:
    data = pickle.dumps(CheckpointException("plan", gathered(5, 2)))
    program = (
        "import pickle, sys; error = pickle.loads(bytes.fromhex(sys.stdin.read()));"
        "print(len(error.failures), error.failures[3][0], 'ckpt_sentry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path}; {program}"],
                          input=data.hex(), capture_output=True, text=True, check=False)  # fmt: skip

    assert done.stdout.strip() == "5 Missing key in checkpoint state_dict: model.adapter1. False", done.stderr
    assert b"ckpt_sentry" not in data


def test_ranks_that_did_not_fail_stay_out() -> None:
    pair = failure()
    error = pickle.loads(pickle.dumps(CheckpointException("plan", {2: pair, 7: failure("1"), 9: pair})))

    assert list(error.failures) == [2, 7, 9]
    assert error.failures[2][0] is error.failures[9][0]


def test_notes_and_attributes_travel() -> None:
    error = CheckpointException("plan", {0: failure(), 1: failure()})
    error.step = 7  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):
        error.add_note("a note")
    pickle.dumps(error)  # what is kept of the first time does not hide what comes
    error.failures[2] = failure("2")
    received = pickle.loads(pickle.dumps(error))

    assert received.step == 7
    assert getattr(received, "__notes__", ["a note"]) == ["a note"]
    assert list(received.failures) == [0, 1, 2]


def test_uninstalled_torchs_own_form_is_back() -> None:
    error = CheckpointException("plan", gathered(4, 1))
    short = pickle.dumps(error)
    ledger.uninstall()

    assert "__reduce__" not in vars(CheckpointException)
    assert len(pickle.dumps(CheckpointException("plan", gathered(4, 1)))) > 2 * len(short)


class TwoArgumentsError(KeyError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}-{second}")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError

    def __reduce__(self) -> Any:
        raise TypeError


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (TwoArgumentsError("x", "y"), KeyError, f"{__name__}.TwoArgumentsError: 'x-y'"),
        (UnprintableError(), RuntimeError, f"{__name__}.UnprintableError: <UnprintableError without a text>"),
    ],
)
def test_what_cannot_be_rebuilt_becomes_the_nearest_builtin(error: Exception, kind: type, text: str) -> None:
    sent = portable(error)

    assert type(sent) is kind
    assert sent.args == (text,)


def test_what_can_be_rebuilt_stays_the_same_object() -> None:
    error = OSError(5, "Input/output error", "/mnt/x")

    assert portable(error) is error


def test_the_told_text_travels() -> None:
    try:
        absent = (key for key in ["k0", "k1"])
        raise KeyError(f"absent: {absent}")  # noqa: TRY301
    except KeyError as error:
        keep_text(error)
        pair = _wrap_exception(error)

    received = pickle.loads(pickle.dumps(pair))[0]

    assert text_of(received) == "'absent: [k{0-1}]'"
    assert "<generator" in str(received)
    assert "KeyError: 'absent: [k{0-1}]'" in str(CheckpointException("plan", {0: (received, None)}))


def test_code_objects_are_taken_out_of_a_traceback() -> None:
    wrapped = failure()
    frame = wrapped[1][0]
    if hasattr(frame, "_code"):
        frame._code = without_code.__code__
    without_code(wrapped)

    assert getattr(frame, "_code", None) is None
    assert pickle.loads(pickle.dumps(wrapped))[0].args == wrapped[0].args


def test_a_copy_is_no_pickle() -> None:
    error = CheckpointException("plan", gathered(3, 2))
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert list(copied.failures) == [0, 1, 2]
        assert [str(inner) for inner, _ in copied.failures.values()] == [str(e) for e, _ in error.failures.values()]
        assert str(copied) == str(error)
        assert type(copied.failures) is dict
        assert copied.args[1] is copied.failures
    assert copy.copy(error).failures is error.failures
