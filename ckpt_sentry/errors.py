"""
What the agent itself raises, and why it may: the one kind of error that the guard lets through to the host.
"""

from __future__ import annotations


class Refusal(RuntimeError):  # noqa: N818 - a decision; the errors are its subclasses
    """
    The agent refuses a load on purpose, as its settings tell it to. `ckpt_sentry` is the `LoadReport`, once there is
    one.
    """

    ckpt_sentry: object = None

    def __init__(self, *arguments: object) -> None:
        # Imported here: this module is loaded when the interpreter starts.
        from ckpt_sentry.masking import clean

        super().__init__(*clean(arguments))


class LowCoverageError(Refusal):
    """
    Too little of the model would be (or has been) loaded: its coverage is under `CKPT_SENTRY_MIN_COVERAGE`, or the
    values that came in are not those of the checkpoint. `is_untouched` tells that nothing had been written yet.
    """

    is_untouched: bool = False
