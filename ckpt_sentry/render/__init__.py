"""
From an aggregate to what people and programs read: text and JSON.
"""
