from __future__ import annotations

import contextvars

from ckpt_sentry.session import loads


def test_a_context_that_was_copied_amid_a_load_forgets_it() -> None:
    load = loads.Load("dcp", "dcp.load", None)
    context = contextvars.copy_context()
    assert context.run(loads.current) is load
    load.leave()

    assert loads.current() is None
    assert context.run(loads.current) is None
