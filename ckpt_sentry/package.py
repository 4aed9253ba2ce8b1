"""
What this package instruments, where OpenTelemetry's tools look for it. The extra `instruments` says the same.
"""

from __future__ import annotations

_instruments: tuple[str, ...] = ("torch >= 2.4",)
