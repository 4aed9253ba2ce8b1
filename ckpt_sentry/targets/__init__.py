"""
One module for each thing that is patched. A target observes and hands facts on; it decides nothing.
"""
