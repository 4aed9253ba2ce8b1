"""
Pure functions on names, shapes and numbers: what a load did, and what to think of it.

Nothing in here imports torch or OpenTelemetry, so every function can be called on data that was written elsewhere.
"""
