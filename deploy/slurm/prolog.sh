#!/bin/sh
# Prolog (slurm.conf: Prolog=): the agent of this node is up before the job is.
#
# A prolog that fails drains the node. A job that is not watched is better than a node that does not work.
systemctl start ckpt-sentry-agent.service || logger -t ckpt-sentry "job $SLURM_JOB_ID: the agent does not start"
exit 0
