"""
torch.distributed.checkpoint: every load that goes through `_load_state_dict`.
"""
