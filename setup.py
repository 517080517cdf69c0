"""Packaging: what `pip install .` gives outside the repository (versions are ranges, not pins)."""

import json
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    text = (ROOT / "kscl" / "__init__.py").read_text()
    return text.split('__version__ = "')[1].split('"')[0]


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
    ).stdout.strip()


class BuildWithCommit(build_py):
    """An installed package has no git beside it, so the commit it was built from goes along."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        try:
            changes = git("status", "--porcelain", "--", "kscl", "linear_eval", "detection")
            info = {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
        except (OSError, subprocess.CalledProcessError):
            info = {"commit": None, "dirty": None}
        target = Path(self.build_lib) / "kscl" / "build_info.json"
        target.write_text(json.dumps(info))


setup(
    name="kscl",
    version=read_version(),
    description="K-shot contrastive pretraining, with proven transfer to Detectron2 detectors",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # tools/ is not installed: a top-level package of that name would shadow other people's.
    packages=[
        *find_packages(include=["kscl", "kscl.*", "linear_eval", "linear_eval.*"]),
        *find_packages(include=["detection", "detection.*"]),
        "kscl.configs",
    ],
    package_dir={"kscl.configs": "configs"},
    package_data={
        "kscl.configs": ["**/*.yaml", "**/*.txt"],
        "kscl.benchmark.leaderboard.page": ["*.js", "*.css", "*.html"],
    },
    install_requires=[
        "torch>=2.5",
        "torchvision>=0.20",
        "timm>=1.0.15",
        "fvcore>=0.1.5.post20221221",
        "iopath>=0.1.9",
        "numpy>=1.26",
        "scikit-learn>=1.4",
        "threadpoolctl>=3.1",
        "scipy>=1.11.2",
        "pillow>=10.1",
        "opencv-python-headless>=4.11",
        "pycocotools>=2.0.7",
        "safetensors>=0.4.3",
        "PyYAML>=6.0",
        "tensorboard>=2.14",
        "matplotlib>=3.8",
        "tqdm>=4.65",
        # Detectron2's own requirements; Detectron2 itself is not on PyPI (kscl install-detectron2)
        "yacs>=0.1.8",
        "omegaconf>=2.3,<2.4",
        "hydra-core>=1.3",
        "tabulate",
        "cloudpickle",
        "termcolor>=1.1",
        "packaging",
    ],
    extras_require={
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "filelock>=3.12",
            "selenium>=4.20",
            "ruff>=0.9",
            "mypy>=1.11",
            "types-PyYAML",
            # Only for tools/export.py onnx, which names them where they are missing
            "onnx>=1.16",
            "onnxruntime>=1.18",
            "onnxscript>=0.2",
        ]
    },
    entry_points={"console_scripts": ["kscl = kscl.main:main"]},
    cmdclass={"build_py": BuildWithCommit},
)
