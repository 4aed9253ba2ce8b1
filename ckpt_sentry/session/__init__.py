"""
The life of one load in this process: begin, phases, conclude; identity, sinks, stalls, exit.
"""
