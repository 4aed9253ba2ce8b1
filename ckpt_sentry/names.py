"""
Every event, span, metric and attribute name, once.

Names that OpenTelemetry's semantic conventions or NVIDIA's registry (`nv.dl.*`) have are used as they are; everything
new is `ckpt_sentry.*`.
"""

from __future__ import annotations

from typing import Final

SCOPE: Final = "ckpt_sentry"
"""Instrumentation scope of all signals, and the name of the standard-library logger."""

EVENT_LOAD_STARTED: Final = "ckpt_sentry.load.started"
EVENT_LOAD_PHASE: Final = "ckpt_sentry.load.phase"
EVENT_LOAD_FAILING: Final = "ckpt_sentry.load.failing"
EVENT_LOAD_FINISHED: Final = "ckpt_sentry.load.finished"
EVENT_LOAD_STALLED: Final = "ckpt_sentry.load.stalled"
EVENT_RANK_ENDED: Final = "ckpt_sentry.rank.ended"
EVENT_RUN_ENDED: Final = "ckpt_sentry.run.ended"
EVENT_LOADS_LEFT_OUT: Final = "ckpt_sentry.session.loads.left_out"

SPAN_LOAD: Final = "checkpoint.load"
"""One for each rank, under one root of the same name; phases are its children."""
SPAN_PHASE_PREFIX: Final = "checkpoint.load."

METRIC_DURATION: Final = "ckpt_sentry.load.duration"
METRIC_COVERAGE: Final = "ckpt_sentry.load.coverage"
METRIC_READ: Final = "ckpt_sentry.load.read"

ATTR_RUN_ID: Final = "ckpt_sentry.run_id"
ATTR_ATTEMPT: Final = "ckpt_sentry.attempt"
ATTR_LOAD_ID: Final = "ckpt_sentry.load_id"
ATTR_ORDINAL: Final = "ckpt_sentry.ordinal"
ATTR_FRAMEWORK: Final = "ckpt_sentry.framework"
ATTR_ENTRY_POINT: Final = "ckpt_sentry.entry_point"
ATTR_VERDICT: Final = "ckpt_sentry.verdict"
ATTR_PHASE: Final = "ckpt_sentry.phase"
ATTR_PATH: Final = "ckpt_sentry.checkpoint.path"
ATTR_FORMAT: Final = "ckpt_sentry.checkpoint.format"
ATTR_STEP: Final = "ckpt_sentry.checkpoint.step"
ATTR_STEP_SOURCE: Final = "ckpt_sentry.checkpoint.step_source"
ATTR_COVERAGE_KEYS: Final = "ckpt_sentry.coverage.keys"
ATTR_COVERAGE_ELEMENTS: Final = "ckpt_sentry.coverage.elements"
ATTR_MISSING: Final = "ckpt_sentry.keys.missing"
ATTR_UNEXPECTED: Final = "ckpt_sentry.keys.unexpected"
ATTR_MISMATCHED: Final = "ckpt_sentry.keys.mismatched"
ATTR_FINDINGS: Final = "ckpt_sentry.findings"
ATTR_BYTES_READ: Final = "ckpt_sentry.bytes_read"

ATTR_RANK: Final = "nv.dl.rank"
ATTR_LOCAL_RANK: Final = "nv.dl.local_rank"
ATTR_WORLD_SIZE: Final = "nv.dl.world_size"
ATTR_RUN_UUID: Final = "nv.dl.run.uuid"
ATTR_SLURM_JOB: Final = "slurm.job.id"

ATTR_SERVICE_NAME: Final = "service.name"
ATTR_HOST_NAME: Final = "host.name"
ATTR_PROCESS_PID: Final = "process.pid"
ATTR_ERROR_TYPE: Final = "error.type"
ATTR_EXCEPTION_TYPE: Final = "exception.type"
ATTR_EXCEPTION_MESSAGE: Final = "exception.message"
