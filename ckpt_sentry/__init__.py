"""
ckpt_sentry: no checkpoint loads silently wrong.

The public names are loaded at first use, so that importing the package costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"
