"""
torchrun and `multiprocessing.spawn`: what a launcher knows of its workers, and what a worker tells it.
"""
