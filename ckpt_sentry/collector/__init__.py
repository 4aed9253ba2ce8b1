"""
From the wire back to reports: receive OTLP, restore events, fold all ranks of a load into one aggregate.
"""
