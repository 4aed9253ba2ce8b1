"""
What the versions of torch and transformers under test do, where that differs and a test has to know: looked up, not
told by their numbers.
"""

from __future__ import annotations

import inspect


def compares_sizes() -> bool:
    """
    Whether `dcp.load` raises for a tensor of another shape.
    """
    from torch.distributed.checkpoint import default_planner

    return "Size mismatch" in inspect.getsource(default_planner.create_default_local_load_plan)


def takes_no_dist() -> bool:
    """
    Whether `dcp.load` knows `no_dist`.
    """
    import torch.distributed.checkpoint as dcp

    return "no_dist" in inspect.signature(dcp.load).parameters


def renames() -> bool:
    """
    Whether `from_pretrained` has transformers 5's way with names: `key_mapping` goes before all else, and of two keys
    that come to one name one is taken.
    """
    import transformers

    finalizers = "_finalize_model_loading", "_finalize_load_state_dict"
    return any(hasattr(transformers.PreTrainedModel, name) for name in finalizers)


def dtype_parameter() -> str:
    """
    How `from_pretrained` calls the type that it is to load in.
    """
    import transformers

    return "dtype" if "dtype" in transformers.LlamaConfig().to_dict() else "torch_dtype"
