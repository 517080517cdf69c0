"""The plan on paper against what is known: the paper's minutes, and counts of others."""

from __future__ import annotations

import pytest
import torch

from kscl.commands.plan import main
from kscl.engine.cost import (
    GPUS,
    IMAGENET_IMAGES,
    PAPER_COUNT,
    count_costs,
    epoch_minutes,
    expected_efficiency,
    forward_passes,
    loader_workers,
    memory_bytes,
    peak_flops,
    step_flops,
    step_seconds,
)
from kscl.keys import load_config
from kscl.methods.encoder import build_encoder
from kscl.methods.keys import method_of


@pytest.fixture(scope="module")
def efficiency():
    return expected_efficiency(load_config(), GPUS["V100"])[0]


@pytest.fixture(scope="module")
def costs():
    """Of ResNet-50 at 224, whatever K is."""
    return count_costs(load_config())


@pytest.mark.parametrize(
    ("shots", "minutes", "error"), [(1, 16, 0.001), (3, 26, 0.03), (5, 37, 0.001)]
)
def test_calibrated_on_both_ends_the_plan_predicts_the_papers_epochs(
    efficiency, costs, shots, minutes, error
):
    cfg = load_config(None, ["METHOD.NUM_SHOTS", str(shots)])
    seconds = step_seconds(cfg, costs, GPUS["V100"], PAPER_COUNT, efficiency)
    predicted = epoch_minutes(seconds, IMAGENET_IMAGES, cfg.SOLVER.BATCH_SIZE)
    assert predicted == pytest.approx(minutes, rel=error)


def test_the_calibration_gives_back_what_it_was_calibrated_on(efficiency, costs):
    cfg = load_config(None, ["METHOD.NUM_SHOTS", "1"])
    seconds = step_seconds(cfg, costs, GPUS["V100"], PAPER_COUNT, efficiency)
    assert epoch_minutes(seconds, IMAGENET_IMAGES, 256) == pytest.approx(16)
    assert 0.2 < efficiency < 0.6


def test_parameters_and_operations_of_resnet50_are_those_that_everyone_counts(costs):
    head = 2048 * 2048 + 2048 + 2048 * 128 + 128
    assert costs.parameters == 23_508_032 + head
    assert costs.forward_flops == pytest.approx(2 * 4.1e9, rel=0.03)


def test_a_step_costs_three_forward_passes_of_the_query_and_one_a_key(costs):
    assert [forward_passes(load_config(None, ["METHOD.NUM_SHOTS", k])) for k in "135"] == [4, 6, 8]
    simclr = load_config("configs/pretrain/simclr_r50_200ep.yaml")
    assert forward_passes(simclr) == 6  # both views are trained
    more = ["METHOD.NUM_SHOTS", "3", "METHOD.NUM_QUERIES", "2"]
    small = ["VIEWS.SMALL.COUNT", "4", "VIEWS.SMALL.SIZE", "112"]  # a quarter of the pixels each
    assert forward_passes(load_config(None, more)) == 3 * 2 + 3
    half = ["INPUT.SIZE", "[[0, 112], [100, 224]]"]  # a quarter of the pixels in half the epochs
    assert forward_passes(load_config(None, [*more, *half])) == (3 * 2 + 3) * (1 / 4 + 1) / 2
    assert forward_passes(load_config(None, [*more, *half, *small])) == 9 * 5 / 8 + 3
    assert forward_passes(load_config(None, [*more, *small])) == 3 * 2 + 3 * 1 + 3
    assert step_flops(load_config(), costs) == pytest.approx(
        256 * 8 * costs.forward_flops, rel=0.02
    )


def test_activations_are_what_autograd_really_keeps():
    words = ["BACKBONE.NAME", "test_resnet", "INPUT.SIZE", "64"]
    costs = count_costs(load_config(None, words))
    encoder = build_encoder("test_resnet", input_size=64)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep_alive = encoder(torch.randn(8, 3, 64, 64))
    weights = sum(weight.nbytes for weight in encoder.parameters())
    assert keep_alive.requires_grad
    assert 8 * costs.activation_bytes == pytest.approx(sum(kept.values()) - weights, rel=0.1)


def test_memory_falls_with_more_gpus_and_with_parts_but_the_dictionary_stays(costs):
    one = memory_bytes(load_config(), costs, 1)
    eight = memory_bytes(load_config(), costs, 8)
    parts = memory_bytes(load_config(None, ["SOLVER.GRAD_ACCUM_STEPS", "8"]), costs, 1)
    assert one["activations"] == 8 * eight["activations"] == 8 * parts["activations"]
    assert one["dictionary"] == eight["dictionary"] == 65536 * 2 * 128 * 4


@pytest.mark.parametrize(
    ("words", "device", "host"),
    [
        (["METHOD.REMEMBER", "5", "METHOD.NUM_SHOTS", "1"], 5 * 128 * 2, 0),
        (["METHOD.REMEMBER", "5", "METHOD.REMEMBER_IN", "host"], 0, 5 * 5 * 128 * 2),
        (["DICTIONARY.TYPE", "memory_bank"], 2 * 128 * 4, 0),
    ],
)
def test_memory_counts_what_is_kept_of_each_image(costs, capsys, words, device, host):
    cfg = load_config(None, words)
    assert memory_bytes(cfg, costs, 8)["kept per image"] == device * 1_281_167
    assert method_of(cfg).extras(cfg).host_per_image == host
    small = ["BACKBONE.NAME", "test_resnet", "INPUT.SIZE", "64"]
    assert main(["--gpu", "A100", "--images", "2000000", *small, *words]) == 0
    assert f"{(device or host) * 2e6 / 2**30:.2f} GiB" in capsys.readouterr().out


def test_the_plan_goes_by_steps_where_they_are_set(capsys):
    words = ["SOLVER.MAX_STEPS", "25000", "VIEWS.SMALL.COUNT", "2", "VIEWS.SMALL.SIZE", "64"]
    words += ["BACKBONE.NAME", "resnet18", "INPUT.SIZE", "64"]
    assert main(["--images", "256000", "--measured-minutes", "6", *words]) == 0
    printed = capsys.readouterr().out
    assert "25 epochs: 2.5 hours" in printed
    assert "14 forward passes" in printed
    assert "2 small ones of 64 pixels" in printed


def test_the_tool_prints_the_plan(capsys):
    words = ["BACKBONE.NAME", "test_resnet", "INPUT.SIZE", "64", "SOLVER.AMP", "bf16"]
    assert main(["--gpu", "A100", "--num-gpus", "2", "--measured-minutes", "3", *words]) == 0
    text = capsys.readouterr().out
    assert "an epoch of 1,281,167 images: 3.0 minutes" in text
    assert "2 x A100" in text


@pytest.mark.parametrize("name", ["kscl_k5_rho40", "moco_v2"])
def test_the_settings_for_gpus_have_the_workers_of_their_plan(name, costs):
    cfg, a100 = load_config(f"pretrain/{name}_r50_200ep_gpu8.yaml"), GPUS["A100"]
    efficiency, _ = expected_efficiency(cfg, a100)
    seconds = step_seconds(cfg, costs, a100, 8, efficiency)
    assert loader_workers(cfg, seconds, 8) == cfg.DATA.NUM_WORKERS


@pytest.mark.parametrize(
    ("gpu", "words", "rate"),
    [
        ("A100", ["SOLVER.AMP", "bf16"], 2500),
        ("A100", ["SOLVER.TF32", "true"], 900),
        ("V100", ["SOLVER.AMP", "fp16"], 1000),
    ],
)
def test_tensor_cores_are_expected_to_train_at_the_assumed_rates(gpu, words, rate, costs):
    cfg = load_config(None, words)
    efficiency, _ = expected_efficiency(cfg, GPUS[gpu])
    passes = peak_flops(cfg, GPUS[gpu], 1) * efficiency / costs.forward_flops
    assert passes / 3 == pytest.approx(rate, rel=0.05)  # a backward pass takes two forward passes


def test_an_unknown_gpu_is_refused_with_the_known_ones(capsys):
    assert main(["--gpu", "Z9000"]) == 2
    assert "V100, T4" in capsys.readouterr().err
