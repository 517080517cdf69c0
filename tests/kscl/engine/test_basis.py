"""Basis images by their definition, and the tool that draws them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from kscl.commands.visualize_basis import main
from kscl.config import config_values
from kscl.engine.basis import basis_images, draw, in_words, to_display
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.methods.base import build_method
from kscl.methods.subspace import fit_subspaces
from tests.helpers.data.photos import jpeg, photo

SMALL = [
    *("BACKBONE.NAME", "resnet18", "BACKBONE.KWARGS", "{channels: [4, 4, 8, 8]}"),
    *("PROJECTOR.DIM", "8", "INPUT.SIZE", "32", "DICTIONARY.QUEUE_LENGTH", "256"),
]


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "photo.jpg"
    path.write_bytes(jpeg(photo(0, 96, 128)))
    return path


def views_and_keys(shots: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    keys = F.normalize(torch.randn(1, 9).double() + 0.5 * torch.randn(shots, 9).double(), dim=1)
    return torch.rand(shots, 3, 5, 5).double(), keys


def save_checkpoint(folder: Path, settings: list[str]) -> Path:
    cfg = load_config(None, [*SMALL, *settings])
    content = {"learner": build_method(cfg).state_dict(), "config": config_values(cfg), "step": 1}
    torch.save(content, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


@pytest.mark.portable
class TestBasisImages:
    def test_weights_are_inner_products_with_the_eigenvectors_of_the_d_by_d_matrix(self) -> None:
        views, keys = views_and_keys()
        basis = basis_images(views, keys, 0.9)
        values, vectors = torch.linalg.eigh(keys.T @ keys)
        for i in range(4):
            w = vectors[:, -1 - i]
            expected = keys @ w
            expected = expected * (1 if expected.sum() >= 0 else -1)
            torch.testing.assert_close(basis.weights[i], expected)
            combined = sum(weight * view for weight, view in zip(expected, views, strict=True))
            torch.testing.assert_close(basis.images[i], combined)
            assert basis.fractions[i].item() == pytest.approx(values[-1 - i].item() / 4)

    @pytest.mark.parametrize("rho", [0.4, 0.9, 1.0])
    def test_as_many_are_kept_as_the_subspace_has(self, rho: float) -> None:
        views, keys = views_and_keys()
        basis = basis_images(views, keys, rho)
        fitted = fit_subspaces(keys[None], rho)
        assert basis.kept == int(fitted.rank)
        kept_mass = basis.weights[: basis.kept].square().sum() / 4
        torch.testing.assert_close(kept_mass, fitted.mass[0])

    def test_identical_views_have_one_basis_image_which_is_the_view(self) -> None:
        views, keys = views_and_keys()
        basis = basis_images(views[:1].expand(4, -1, -1, -1), keys[:1].expand(4, -1), 1.0)
        assert basis.kept == 1
        shown = to_display(basis.images[0], basis.weights[0])
        torch.testing.assert_close(shown, views[0])
        assert basis.weights[1:].abs().max() < 1e-6

    def test_what_weighs_nothing_is_written_without_a_sign_and_drawn_grey(self) -> None:
        assert [in_words(w) for w in (0.126, -0.3, 0.004, -0.004)] == [
            "+0.13",
            "−0.30",
            "0.00",
            "0.00",
        ]
        nothing = to_display(torch.zeros(3, 2, 2), torch.zeros(4))
        assert torch.equal(nothing, torch.full((3, 2, 2), 0.5))

    def test_what_is_displayed_lies_within_black_and_white(self) -> None:
        basis = basis_images(*views_and_keys(), 1.0)
        for image, weights in zip(basis.images, basis.weights, strict=True):
            shown = to_display(image, weights)
            assert shown.min() >= 0
            assert shown.max() <= 1 + 1e-9

    def test_a_share_outside_zero_and_one_is_refused(self) -> None:
        with pytest.raises(KsclError, match="rho is 40"):
            basis_images(*views_and_keys(), 40)


class TestTool:
    @pytest.mark.parametrize("shots", [1, 3])
    def test_draws_every_format_from_random_weights(
        self, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shots: int
    ) -> None:
        outputs = [tmp_path / "new" / f"basis.{ending}" for ending in ("png", "svg", "pdf")]
        arguments = ["--image", str(picture), "--random-weights", "--num-shots", str(shots)]
        arguments += ["--rho", "0.9", "--seed", "1"]
        for output in outputs:
            arguments += ["--output", str(output)]
        assert main([*arguments, *SMALL, "PROJECTOR.TYPE", "mlp_bn"]) == 0
        assert f"of {shots} eigenvectors" in capsys.readouterr().out
        with Image.open(outputs[0]) as drawn:
            assert drawn.size[0] > drawn.size[1] > 300
        assert outputs[1].read_bytes().startswith(b"<?xml")
        assert outputs[2].read_bytes().startswith(b"%PDF")

    def test_shows_views_with_their_weights_and_which_eigenvectors_are_kept(
        self, tmp_path: Path
    ) -> None:
        views, keys = views_and_keys(3)
        basis = basis_images(views, keys, 0.8)
        assert 0 < basis.kept < 3
        draw(views, basis, [tmp_path / "basis.svg"], 0.8)
        # Matplotlib draws letters as paths and leaves the words themselves in comments.
        words = re.findall("<!-- (.*) -->", (tmp_path / "basis.svg").read_text())
        assert [word for word in words if word.startswith("view ")] == [
            "view 1",
            "view 2",
            "view 3",
        ]
        assert [word for word in words if word in ("kept", "dropped")] == (
            ["kept"] * basis.kept + ["dropped"] * (3 - basis.kept)
        )
        shares = [f"{share:.1%} of the mass" for share in basis.fractions.tolist()]
        assert [word for word in words if word.endswith("% of the mass")][1:] == shares
        weights = [float(w.replace("−", "-")) for w in words if re.fullmatch(r"[+−]?\d\.\d\d", w)]
        assert weights == pytest.approx(basis.weights.flatten().tolist(), abs=0.006)
        assert words.count("basis image") == 1

    @pytest.mark.parametrize(
        "method", [[], ["DICTIONARY.TYPE", "minibatch", "KEY_ENCODER.TYPE", "shared"]]
    )
    def test_takes_weights_and_config_from_a_checkpoint(
        self, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: list[str]
    ) -> None:
        checkpoint = save_checkpoint(tmp_path, [*method, "METHOD.NUM_SHOTS", "4"])
        drawn = []
        for seed in ("0", "0", "5"):
            output = tmp_path / f"basis{len(drawn)}.png"
            arguments = ["--image", str(picture), "--checkpoint", str(checkpoint), "--seed", seed]
            assert main([*arguments, "--output", str(output)]) == 0
            drawn.append(output.read_bytes())
        assert "of 4 eigenvectors" in capsys.readouterr().out
        assert drawn[0] == drawn[1] != drawn[2]

    def test_overrides_change_single_settings_of_the_checkpoints_config(
        self, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checkpoint = save_checkpoint(tmp_path, ["METHOD.NUM_SHOTS", "4"])
        arguments = ["--image", str(picture), "--checkpoint", str(checkpoint)]
        arguments += ["--output", str(tmp_path / "basis.png")]
        assert main([*arguments, "METHOD.NUM_SHOTS", "2", "INPUT.SIZE", "48"]) == 0
        assert "of 2 eigenvectors" in capsys.readouterr().out
        assert main([*arguments, "METHOD.SHOTS", "2"]) == 2
        assert "METHOD.NUM_SHOTS" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--image", "no.jpg", "--random-weights"], "no.jpg cannot be read"),
            (["--image", "{text}", "--random-weights"], "notes.txt is not an image"),
            (["--image", "{picture}", "--checkpoint", "{text}"], "notes.txt"),
            (["--image", "{picture}", "--random-weights", "--rho", "1.5"], "rho is 1.5"),
            (["--image", "{picture}", "--random-weights", "--num-shots", "0"], "0 key views"),
        ],
    )
    def test_what_a_user_can_fix_is_one_line_without_a_traceback(
        self,
        picture: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        named: str,
    ) -> None:
        text = tmp_path / "notes.txt"
        text.write_text("not a picture")
        filled = [word.format(text=text, picture=picture) for word in arguments]
        assert main([*filled, *SMALL]) == 2
        assert named in capsys.readouterr().err

    def test_an_unknown_ending_is_refused(self, picture: Path) -> None:
        with pytest.raises(SystemExit):
            main(["--image", str(picture), "--random-weights", "--output", "basis.bmp"])
