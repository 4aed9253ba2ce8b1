"""
A checkpoint whose keys carry a prefix that the model does not have: `python examples/wrong_prefix.py`.

Three times the same call: as it is today, under the agent, and under the agent with leave to rename. No network, no
GPU, a model of three layers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = (
    ("today", {"CKPT_SENTRY": "0"}),
    ("CKPT_SENTRY=1", {"CKPT_SENTRY": "1"}),
    ("CKPT_SENTRY=1 CKPT_SENTRY_ALIGN=auto", {"CKPT_SENTRY": "1", "CKPT_SENTRY_ALIGN": "auto"}),
)


def load(path: str) -> None:
    """
    What a program does: build the model, load, generate.
    """
    import torch
    from accelerate import load_checkpoint_and_dispatch

    model = load_checkpoint_and_dispatch(net(), path, device_map="auto")
    with torch.no_grad():
        answer = model(torch.arange(4)).argmax(-1).tolist()
    print(f"the model says {answer}; it was trained to say [1, 2, 3, 4]")


def save(path: str) -> None:
    """
    A model that has learnt to count, saved from within a wrapper that called it "model".
    """
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(200):
        numbers = torch.randint(0, 15, (32,))
        loss = torch.nn.functional.cross_entropy(model(numbers), numbers + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def net() -> object:
    """
    An embedding, a hidden layer and a head.
    """
    from torch import nn

    return nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


def main() -> None:
    """
    Save once and load in three processes.
    """
    if len(sys.argv) > 1:
        load(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        save(path)
        for title, settings in RUNS:
            print(f"\n== {title}", flush=True)
            quiet = {"TQDM_DISABLE": "1", "CKPT_SENTRY_DIR": str(Path(folder) / "records")}
            done = subprocess.run(
                [sys.executable, __file__, path],
                env=os.environ | quiet | settings,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            print(done.stdout.strip())


if __name__ == "__main__":
    main()
