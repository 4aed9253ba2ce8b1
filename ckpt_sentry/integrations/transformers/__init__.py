"""
transformers: `from_pretrained`, adapters, and the shards that `Trainer` resumes from.
"""
