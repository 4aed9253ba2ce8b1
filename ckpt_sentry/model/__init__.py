"""
What a torch module or state dict holds: inventories, values, provenance.
"""
