from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from ckpt_sentry.integrations.accelerate import device_map
from ckpt_sentry.model.inventories import model_inventory


def model():
    return nn.ModuleDict({"embed": nn.Embedding(4, 2), "layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})


def examined(given):
    made = model()
    return device_map.examine(given, made, model_inventory(made))


def codes(given):
    return {finding.code: finding.text for finding in device_map.findings(examined(given))}


@pytest.mark.parametrize("given", [None, "auto", "sequential", {"": "cpu"}, {"embed": "cpu", "layers": "disk"}])
def test_maps_that_are_well(given):
    assert codes(given) == {}


def test_unknown_names_come_with_the_nearest_real_ones():
    text = codes({"model.embed": "cpu", "layer": "cpu", "": "cpu"})["device_map_unknown_name"]

    assert "model.embed (the model has embed)" in text
    assert "layer (the model has layers)" in text


def test_every_key_without_a_device_is_named():
    assert examined({"embed": "cpu", "layers.0": "cpu"}).uncovered == ("layers.1.weight", "layers.1.bias")
    text = codes({"embed": "cpu", "layers.0": "cpu"})["device_map_uncovered"]
    assert text == "device_map gives no device for 2 keys of the model: layers.1.{bias,weight}."


def test_a_name_covers_whole_components_only():
    assert device_map.uncovered({"layers.1": "cpu"}, ["layers.10.w", "layers.1.w", "layers.1"]) == ("layers.10.w",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (0, "is 0 (int), not a map"),
        ("cpu", "is 'cpu', which is no name of a strategy"),
        ({"": "cpuu"}, "the whole model: 'cpuu' is no device; did you mean 'cpu'?"),
        ({"": True}, "True is no device"),
        ({"": 1.5}, "1.5 is no device"),
        ({"": -1}, "device -1 is not there"),
        ({"": "disk"}, "sends every part to disk"),
    ],
)
def test_values_that_are_no_device(given, words):
    assert words in codes(given)["device_map_bad_value"]


@pytest.mark.parametrize("device", ["cpu", "disk", "meta", torch.device("cpu")])
def test_values_that_are_devices(device):
    assert device_map.bad_device(device) is None


def test_the_longest_name_decides():
    assert device_map.device_of({"": "cpu", "layers": "disk", "layers.1": "cpu"}, "layers.1.weight") == "cpu"
    assert device_map.device_of({"layers": "disk"}, "layers.0.weight") == "disk"
    assert device_map.device_of({"layers": "disk"}, "embed.weight") is None


def test_a_map_that_put_all_on_one_device_is_seen():
    assert "all of it on cpu" in device_map.placed("auto", {"": "cpu"}).text
    assert device_map.placed({"": "cpu"}, {"": "cpu"}) is None
    assert "cpu: embed; disk: layers" in device_map.placed({}, {"embed": "cpu", "layers": "disk"}).text


def test_keys_that_ended_elsewhere():
    found = device_map.elsewhere({"": "cpu"}, {"a": "cpu", "b": "cuda"}, lambda kind, asked: kind == asked)

    assert (found.code, found.level) == ("device_map_ignored", "warning")
    assert "1 keys: b ended on cuda" in found.text


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")

    assert device_map.folder_finding(tmp_path / "new" / "deep") is None
    assert "is no folder" in device_map.folder_finding(tmp_path / "file" / "sub").text
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)

    assert "is not writable" in device_map.folder_finding(tmp_path / "closed" / "sub").text
