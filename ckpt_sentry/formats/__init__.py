"""
What lies at a path, from headers alone: no tensor is read and no pickle is ever executed.
"""
