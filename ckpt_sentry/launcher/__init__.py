"""
The launcher's side: it listens to its workers, outlives them all and reports for the job.
"""
