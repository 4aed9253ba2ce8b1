#!/bin/sh
# Task prolog (slurm.conf: TaskProlog=): lines of the form "export NAME=value" become the environment of each task.
#
# What the user has set stays.
[ -n "$CKPT_SENTRY" ] || echo "export CKPT_SENTRY=1"
[ -n "$OTEL_EXPORTER_OTLP_ENDPOINT" ] || echo "export OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318"
