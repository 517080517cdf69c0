"""How known projects name a backbone's tensors in their checkpoints.

Wrappers are left out of the names here: `module.` (DataParallel, DDP, moving averages) and
`_orig_mod.` (torch.compile) are removed from a file's names wherever they occur. Every entry also
applies to its state dict saved alone, without the container.
"""

from __future__ import annotations

from dataclasses import dataclass

from kscl.backbone_file.file import IMAGENET_MEAN, IMAGENET_STD

Container = tuple[str, ...]  # keys that lead to a dict of tensors; () is the file itself
Color = tuple[float, ...]
Input = tuple[Color, Color] | str  # mean and std, or why they must be given

IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
SWAV_INPUT = (IMAGENET_MEAN, (0.228, 0.224, 0.225))  # swav/src/multicropdataset.py
# Classifiers of torchvision and timm
HEADS = ("fc.", "head.", "classifier.", "head_dist.", "heads.", "heads_dist.")


@dataclass(frozen=True)
class Layout:
    """How one project names a backbone's tensors, what else its files hold, and its input."""

    container: Container
    prefix: str
    leave_behind: tuple[str, ...] = ()  # prefixes of tensors that belong to something else
    marks: tuple[str, ...] = ()  # a file has a tensor with one of these prefixes, or is another's
    instead_of: tuple[tuple[Container, str], ...] = ()  # networks that are not taken
    takes: str = ""  # logged if the file holds one of them
    input: Input = IMAGENET
    sequence: bool = False  # layers are named by their position, as nn.Sequential does


STATE, MODEL = ("state_dict",), ("model",)
PLAIN_INPUT = "this project trains on plain [0, 1]"
BY_DATA_SET = "this project normalizes by the data set that it trains on"


def _lightly(sequence: bool) -> Layout:
    others = ("teacher_backbone.", "query_backbone.", "key_backbone.", "backbone_momentum.")
    heads = ("projection_head", "prediction_head", "online_classifier.", "criterion.", "prototypes")
    more = ("teacher_", "query_", "key_")
    return Layout(
        STATE,
        "backbone.",
        (*others, *heads, *more),
        marks=heads,
        instead_of=tuple((STATE, other) for other in others),
        takes="'backbone', which lightly's own evaluation runs",
        sequence=sequence,
    )


def _plain(container: Container) -> Layout:
    # `n_averaged` counts the steps of torch.optim.swa_utils.AveragedModel.
    return Layout(container, "", (*HEADS, "n_averaged"))


# The first that fits is taken. Sources are public repositories, as of 2026.
LAYOUTS: dict[str, Layout] = {
    "kscl checkpoint": Layout(
        ("learner",),
        "encoder.backbone.",
        ("encoder.head.", "key_encoder.", "dictionary.", "steps"),
        instead_of=((("learner",), "key_encoder.backbone."),),
        takes="the encoder, which a run exports, and not the momentum encoder",
    ),
    # facebookresearch/moco, v1 and v2: main_moco.py, main_lincls.py
    "moco": Layout(
        STATE,
        "encoder_q.",
        ("encoder_q.fc.", "encoder_k.", "queue"),
        instead_of=((STATE, "encoder_k."),),
        takes="the query encoder, which MoCo's own evaluation uses, and not the key encoder",
    ),
    # facebookresearch/moco-v3: moco/builder.py, main_lincls.py
    "moco v3": Layout(
        STATE,
        "base_encoder.",
        ("base_encoder.fc.", "base_encoder.head.", "momentum_encoder.", "predictor."),
        instead_of=((STATE, "momentum_encoder."),),
        takes="the base encoder, which MoCo v3's own evaluation uses, and not the momentum encoder",
    ),
    # facebookresearch/simsiam: simsiam/builder.py, main_lincls.py
    "simsiam": Layout(STATE, "encoder.", ("encoder.fc.", "predictor."), marks=("predictor.",)),
    # sthalles/SimCLR: models/resnet_simclr.py, data_aug/contrastive_learning_dataset.py
    "simclr (sthalles)": Layout(
        STATE, "backbone.", ("backbone.fc.",), marks=("backbone.fc.",), input=PLAIN_INPUT
    ),
    # Spijkervet/SimCLR: simclr/simclr.py, modules/transformations/simclr.py
    "simclr (spijkervet)": Layout(
        (), "encoder.", ("projector.",), marks=("projector.",), input=PLAIN_INPUT
    ),
    # AndrewAtanov/simclr-pytorch: models/encoder.py, models/ssl.py
    "simclr (atanov)": Layout(STATE, "convnet.", ("convnet.fc.", "projection."), input=PLAIN_INPUT),
    # yaox12/BYOL-PyTorch: model/basic_modules.py, trainer/byol_trainer.py
    "byol (yaox12)": Layout(
        MODEL,
        "online_network.encoder.",
        ("online_network.projetion.", "target_network.", "predictor."),
        instead_of=((MODEL, "target_network.encoder."),),
        takes="the online network, and not the target network",
        sequence=True,
    ),
    # sthalles/PyTorch-BYOL: trainer.py, models/resnet_base_network.py, data/transforms.py
    "byol (sthalles)": Layout(
        ("online_network_state_dict",),
        "encoder.",
        ("projetion.",),
        marks=("projetion.",),
        instead_of=((("target_network_state_dict",), "encoder."),),
        takes="the online network, and not the target network",
        input=PLAIN_INPUT,
        sequence=True,
    ),
    # lucidrains/byol-pytorch: byol_pytorch/byol_pytorch.py, the whole learner
    "byol (lucidrains)": Layout(
        (),
        "net.",
        ("net.fc.", "online_encoder.", "target_encoder.", "online_predictor."),
        marks=("online_encoder.",),
        instead_of=(((), "target_encoder.net."),),
        takes="the online network, and not the target network",
    ),
    # facebookresearch/swav: main_swav.py, main_deepclusterv2.py, src/resnet50.py; it also trained
    # SeLa-v2. Released files are the state dict alone.
    "swav, deepcluster-v2, sela-v2": Layout(
        STATE,
        "",
        ("projection_head.", "prototypes."),
        marks=("projection_head.", "prototypes."),
        input=SWAV_INPUT,
    ),
    # facebookresearch/dino: main_dino.py, eval_linear.py
    "dino": Layout(
        ("teacher",),
        "backbone.",
        ("head.",),
        marks=("head.",),
        instead_of=((("student",), "backbone."),),
        takes="the teacher, which DINO's own evaluation uses (--container student for the other)",
    ),
    "dino (student)": Layout(("student",), "backbone.", ("head.",), marks=("head.",)),
    # facebookresearch/barlowtwins: main.py; facebookresearch/vicreg: main_vicreg.py;
    # facebookresearch/VICRegL: main_vicregl.py
    "barlow twins, vicreg, vicregl": Layout(
        MODEL,
        "backbone.",
        ("projector.", "maps_projector.", "classifier.", "bn."),
        marks=("projector.", "maps_projector."),
    ),
    # WXinlong/DenseCL: openselfsup/models/densecl.py; open-mmlab/mmselfsup: models/algorithms/
    "densecl, openselfsup, mmselfsup": Layout(
        STATE,
        "backbone.",
        (
            *("neck.", "head.", "encoder_q.", "encoder_k.", "online_net.", "target_net."),
            *("queue", "memory_bank.", "loss.", "data_preprocessor."),
        ),
        marks=("neck.", "head.", "encoder_q.", "online_net."),
        instead_of=((STATE, "encoder_k.0."), (STATE, "target_net.0.")),
        takes="'backbone', the network that is trained, and not its moving average",
    ),
    # zdaxie/PixPro: contrast/models/PixPro.py, main_pretrain.py
    "pixpro": Layout(
        MODEL,
        "encoder.",
        ("encoder.fc.", "encoder_k.", "projector", "predictor.", "value_transform."),
        marks=("encoder_k.",),
        instead_of=((MODEL, "encoder_k."),),
        takes="the encoder, which PixPro's own transfer uses, and not the momentum encoder",
    ),
    # HobbitLong/PyContrast: networks/build_backbone.py, learning/contrast_trainer.py
    "infomin, insdis, pirl": Layout(
        MODEL,
        "encoder.",
        ("encoder.fc.", "head.", "head_jig."),
        marks=("head.", "head_jig."),
        instead_of=((("model_ema",), "encoder."),),
        takes="'model', which PyContrast's own evaluation uses, and not its moving average",
    ),
    # facebookresearch/vissl: extra_scripts/convert_vissl_to_detectron2.py
    "vissl": Layout(("classy_state_dict", "base_model", "model", "trunk"), "_feature_blocks."),
    # vturrisi/solo-learn: solo/methods/base.py, byol.py, mocov2plus.py
    "solo-learn": Layout(
        STATE,
        "backbone.",
        (
            *("classifier.", "projector.", "predictor.", "prototypes.", "queue"),
            *("momentum_backbone.", "momentum_projector.", "momentum_classifier."),
        ),
        marks=("classifier.", "projector."),
        instead_of=((STATE, "momentum_backbone."),),
        takes="'backbone', which solo-learn's own evaluation uses, and not the momentum backbone",
        input=BY_DATA_SET,
    ),
    # lightly-ai/lightly: benchmarks/imagenet/resnet50/ and examples/pytorch_lightning/
    "lightly": _lightly(sequence=False),
    "lightly (sequence)": _lightly(sequence=True),
    # facebookresearch/mae: models_mae.py, util/misc.py
    "mae": Layout(MODEL, "", ("mask_token", "decoder_"), marks=("decoder_",)),
    # facebookresearch/dinov2: hubconf.py, dinov2/models/vision_transformer.py
    "dinov2": Layout((), "", ("mask_token",), marks=("mask_token",)),
    # timm: utils/checkpoint_saver.py; torchvision: references/classification/train.py; files of
    # either's model zoo; VISSL's files in torchvision's names (model_state_dict).
    "plain": _plain(()),
    "plain (state_dict)": _plain(STATE),
    "plain (state_dict_ema)": _plain(("state_dict_ema",)),
    "plain (model)": _plain(MODEL),
    "plain (model_ema)": _plain(("model_ema",)),
    "plain (model_state_dict)": _plain(("model_state_dict",)),
}
