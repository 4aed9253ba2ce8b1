"""
A program with things of its own that a load must leave as they are: `dcp_host.py SCENARIO FOLDER`.

Prints OK at the end, or ends with an AssertionError.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

CHECKPOINT = Path(sys.argv[2]) / "step-7"


def save() -> None:
    """
    Two tensors and a number.
    """
    dcp.save({"a": torch.ones(3), "b": torch.ones(2), "n": 5}, checkpoint_id=CHECKPOINT)


def load(**more: torch.Tensor) -> BaseException | None:
    """
    Load them, and what the checkpoint lacks.
    """
    state = {"a": torch.zeros(3), "b": torch.zeros(2), "n": 0, **more}
    try:
        dcp.load(state, checkpoint_id=CHECKPOINT)
    except dcp.CheckpointException as error:
        return error
    return None


def telemetry_of_its_own() -> None:
    """
    The host has set a TracerProvider, structlog and logging.
    """
    import structlog
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    processors = [structlog.processors.JSONRenderer()]
    structlog.configure(processors=processors)
    handler = logging.NullHandler()
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    assert load() is None
    assert load(c=torch.zeros(1)) is not None
    assert trace.get_tracer_provider() is provider
    assert structlog.get_config()["processors"] is processors
    assert logging.getLogger().handlers == [handler]
    assert logging.getLogger().level == logging.ERROR


def nothing_left_behind() -> None:
    """
    No thread, no file descriptor, after good and failing loads.
    """
    load()
    threads, files = threading.enumerate(), sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        load()
        load(c=torch.zeros(1))
    assert threading.enumerate() == threads
    assert sorted(os.listdir("/proc/self/fd")) == files


def nothing_kept_alive() -> None:
    """
    Tensors and exceptions go when the program lets go of them.
    """
    tensor = torch.zeros(3)
    seen = weakref.ref(tensor)
    dcp.load({"a": tensor}, checkpoint_id=CHECKPOINT)
    del tensor
    gc.collect()
    assert seen() is None, gc.get_referrers(seen())
    tensor = torch.zeros(1)
    seen = weakref.ref(tensor)
    error = load(c=tensor)
    assert error is not None
    failed = weakref.ref(error)
    del tensor, error
    gc.collect()
    assert seen() is None, gc.get_referrers(seen())
    assert failed() is None


def randomness_of_its_own() -> None:
    """
    The host's random numbers are its own.
    """
    import random

    random.seed(7)
    torch.manual_seed(7)
    before, torch_before = random.getstate(), torch.get_rng_state()
    load()
    load(c=torch.zeros(1))
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


def a_handler_that_loads() -> None:
    """
    A signal arrives while the agent takes down an event, and its handler makes a load of its own.
    """
    import signal

    from ckpt_sentry.collector.records import Records

    append, seen = Records.append_line, []

    def interrupted(self: Records, line: bytes) -> bool:
        seen.append(line)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGUSR1)
        return append(self, line)

    signal.signal(signal.SIGUSR1, lambda *_: load())
    Records.append_line = interrupted  # type: ignore[method-assign,assignment]
    assert load() is None
    assert len(seen) > 4


def secret_path() -> None:
    """
    A path with credentials in it.
    """
    try:
        dcp.load({"a": torch.zeros(3)}, checkpoint_id="s3://AKIA:hunter2@bucket/step-7?X-Amz-Signature=abcdef0123")
    except BaseException as error:
        raise SystemExit(repr(getattr(error, "ckpt_sentry", None)) + "".join(getattr(error, "__notes__", []))) from None


def put_back() -> None:
    """
    uninstall() gives back every original, aliases included.
    """
    from torch.distributed.checkpoint import load as early

    import ckpt_sentry

    wrapped = early
    ckpt_sentry.uninstall()
    original = dcp.load
    assert original is not wrapped
    assert original.__module__ == "torch.distributed.checkpoint.state_dict_loader"
    assert dcp.state_dict_loader.load is original
    alias = sys.modules["__main__"].__dict__["late_alias"] = dcp.state_dict_loader._load_state_dict
    ckpt_sentry.install()
    assert dcp.load is not original
    assert sys.modules["__main__"].__dict__["late_alias"] is not alias
    ckpt_sentry.uninstall()
    assert dcp.load is original
    assert sys.modules["__main__"].__dict__["late_alias"] is alias
    assert wrapped({"a": torch.zeros(3)}, checkpoint_id=CHECKPOINT) is None


if __name__ == "__main__":
    save()
    globals()[sys.argv[1]]()
    print("OK")
