"""
torch.nn: `Module.load_state_dict`, `set_model_state_dict`, and the files that state dicts are read from.
"""
