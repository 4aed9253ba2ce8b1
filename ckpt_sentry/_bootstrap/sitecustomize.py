"""
Start the agent where `site` finds no `ckpt_sentry.pth`; `ckpt-sentry run` puts this folder first on PYTHONPATH.

Whatever `sitecustomize` the environment has of its own runs all the same. An interpreter other than the one that
`ckpt-sentry run` was started with is left alone: PYTHONPATH reaches it, but our dependencies may not fit.
"""

from __future__ import annotations

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    prefix = os.environ.get("CKPT_SENTRY_BOOTSTRAP")
    if prefix is not None and os.path.realpath(prefix) != os.path.realpath(sys.prefix):
        if prefix:
            _say(f"off in {sys.executable}: another Python than ckpt-sentry's ({prefix}); install ckpt-sentry there")
            # Said once: the children of this process stay as quiet as they are switched off.
            os.environ["CKPT_SENTRY_BOOTSTRAP"] = ""
        return
    root = os.path.dirname(os.path.dirname(_FOLDER))
    if root not in sys.path:
        sys.path.append(root)
    try:
        from ckpt_sentry import _startup

        _startup.start_by(_startup.RUN)
    except Exception as error:
        _say(f"not started: {type(error).__name__}: {error}")


def _chain() -> None:
    """
    Run the `sitecustomize` that this one hides, as if this folder were not there.
    """
    entry = next((entry for entry in sys.path if os.path.abspath(entry) == _FOLDER), None)
    if entry is None:
        return
    position = sys.path.index(entry)
    sys.path.remove(entry)
    ourselves = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path.insert(position, entry)
        # The import system insists on finding something under the name that it is just importing.
        sys.modules.setdefault("sitecustomize", ourselves)


def _say(text: str) -> None:
    try:
        os.write(2, f"ckpt_sentry: {text}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        return


if __name__ == "sitecustomize":
    _start()
    _chain()
