"""
From events and reports to the wire: structlog lines, OpenTelemetry logs, spans and metrics.
"""
