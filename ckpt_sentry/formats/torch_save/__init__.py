"""
What a file of `torch.save` holds, without torch and without running its pickle.
"""
