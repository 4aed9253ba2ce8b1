"""
`python -m ckpt_sentry`: the same as `ckpt-sentry`, for installs whose scripts are not on the PATH.
"""

from __future__ import annotations

from ckpt_sentry.cli import main

main(prog_name="ckpt-sentry")
