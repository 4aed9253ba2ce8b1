"""
What replaces the host's functions and gives them back: guard, ledger, search for aliases, hooks after imports.
"""
