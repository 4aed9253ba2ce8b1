"""
What lies on disk of a distributed checkpoint.
"""
