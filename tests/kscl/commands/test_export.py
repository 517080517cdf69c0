"""An exported backbone computes what PyTorch computes, outside of PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kscl.backbone_file import load_backbone, save_backbone
from kscl.commands.export import main

KWARGS = {"channels": [8, 16, 32, 64]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    loaded = load_backbone("random", "resnet18", KWARGS)
    path = tmp_path_factory.mktemp("export") / "backbone.safetensors"
    save_backbone(path, loaded.backbone.state_dict(), loaded.description)
    return path


def test_onnxruntime_computes_the_features_of_pytorch_for_any_batch(weights, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    output = tmp_path / "backbone.onnx"
    assert main(["onnx", str(weights), "--output", str(output), "--size", "64"]) == 0
    assert "backbone.onnx" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(output, providers=["CPUExecutionProvider"])
    backbone = load_backbone(weights).backbone
    for batch in (1, 5):
        images = torch.randn(batch, 3, 64, 64)
        (found,) = session.run(None, {"images": images.numpy()})
        expected = backbone(images).detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_a_missing_package_is_named_before_any_work(weights, tmp_path, capsys, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["onnx", str(weights), "--output", str(tmp_path / "a.onnx")]) == 2
    assert "pip install onnx onnxruntime onnxscript" in capsys.readouterr().err
    assert not (tmp_path / "a.onnx").exists()
