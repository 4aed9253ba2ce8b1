"""
accelerate: the big-model loaders, `Accelerator.load_state` and FSDP's files.
"""
