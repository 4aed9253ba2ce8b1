"""
From events back to reports: keep them, read them, fold those of all ranks of a load into one aggregate.
"""
