"""Every key of a pretraining config, with its default: the paper's setting (K = 5, rho = 40 %)."""

from __future__ import annotations

from fvcore.common.config import CfgNode

from kscl.views.recipes import MOCO_V2


def pretrain_defaults() -> CfgNode:
    cfg = CfgNode()
    cfg.OUTPUT_DIR = "output/pretrain"
    cfg.SEED = 0
    cfg.LABEL = "kscl"  # what the leaderboard calls it; changes no result

    cfg.DATA = CfgNode()
    cfg.DATA.TRAIN = ""  # a folder, a .txt list, tar shards, voc:FOLDER:SPLIT
    cfg.DATA.NUM_WORKERS = 4  # a rank
    cfg.DATA.BAD_IMAGES = "skip"  # or "error"
    cfg.DATA.MAX_BAD_FRACTION = 0.01  # more unreadable images than this stop the run
    cfg.DATA.MAX_PIXELS = 178_956_970  # a larger image is not decoded but counts as unreadable
    cfg.DATA.CACHE_DIR = ""  # the index of files; "" is the user's cache folder
    cfg.DATA.NORMALIZE_ON_DEVICE = (
        True  # views leave the workers as bytes and are normalised on the device
    )

    cfg.INPUT = CfgNode()
    cfg.INPUT.SIZE = 224
    cfg.INPUT.MEAN = [0.485, 0.456, 0.406]
    cfg.INPUT.STD = [0.229, 0.224, 0.225]

    cfg.AUGMENT = [dict(op) for op in MOCO_V2]  # in this order

    cfg.BACKBONE = CfgNode()
    cfg.BACKBONE.NAME = "resnet50"  # any timm model
    cfg.BACKBONE.KWARGS = CfgNode(new_allowed=True)  # goes to timm.create_model

    cfg.PROJECTOR = CfgNode()
    cfg.PROJECTOR.TYPE = "mlp"  # "mlp_bn" (BatchNorm between its layers) or "linear"
    cfg.PROJECTOR.HIDDEN_DIM = 0  # 0 is the backbone's feature dimension
    cfg.PROJECTOR.DIM = 128  # D, of the embeddings

    cfg.METHOD = CfgNode()
    cfg.METHOD.NUM_SHOTS = 5  # K key views an image
    cfg.METHOD.RHO = 0.4  # share of the eigenvalue mass that a subspace keeps
    cfg.METHOD.SIMILARITY = "projection"  # "cosine" (K = 1) or "mean_cosine" (a control)
    cfg.METHOD.TEMPERATURE = 0.2
    cfg.METHOD.GRAD_THROUGH_KEYS = False  # minibatch dictionary only
    cfg.METHOD.SYMMETRIC = False  # each view in turn is the query (SimCLR)

    cfg.KEY_ENCODER = CfgNode()
    cfg.KEY_ENCODER.TYPE = "momentum"  # or "shared"
    cfg.KEY_ENCODER.MOMENTUM = 0.999
    cfg.KEY_ENCODER.BATCH_NORM = "train"  # or "eval": averaged statistics of the query encoder

    cfg.DICTIONARY = CfgNode()
    cfg.DICTIONARY.TYPE = "queue"  # "minibatch" or "memory_bank"
    cfg.DICTIONARY.QUEUE_LENGTH = 65536
    cfg.DICTIONARY.BANK_MOMENTUM = 0.0  # 0 replaces the slot

    cfg.SOLVER = CfgNode()
    cfg.SOLVER.EPOCHS = 200
    cfg.SOLVER.BATCH_SIZE = 256  # images a step, over all ranks and parts
    cfg.SOLVER.OPTIMIZER = "sgd"
    cfg.SOLVER.BASE_LR = 0.03  # at REFERENCE_BATCH_SIZE
    cfg.SOLVER.SCALE_LR = True  # in proportion to BATCH_SIZE / REFERENCE_BATCH_SIZE
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 256
    cfg.SOLVER.MOMENTUM = 0.9
    cfg.SOLVER.WEIGHT_DECAY = 1e-4
    cfg.SOLVER.SCHEDULE = "cosine"  # or "step"
    cfg.SOLVER.LR_UPDATE = "epoch"  # or "iter": how often the learning rate changes
    cfg.SOLVER.MILESTONES = [120, 160]  # epochs, for the step schedule
    cfg.SOLVER.GAMMA = 0.1
    cfg.SOLVER.WARMUP_EPOCHS = 0.0
    cfg.SOLVER.GRAD_ACCUM_STEPS = 1  # parts in which a rank's share of the batch is computed
    cfg.SOLVER.CLIP_GRAD_NORM = 0.0  # 0 clips nothing
    cfg.SOLVER.AMP = "off"  # "bf16" or "fp16"
    cfg.SOLVER.CHANNELS_LAST = False

    cfg.CHECKPOINT = CfgNode()
    cfg.CHECKPOINT.PERIOD_EPOCHS = 1
    cfg.CHECKPOINT.PERIOD_STEPS = 0  # also within epochs; 0 is never
    cfg.CHECKPOINT.KEEP = 2  # the newest so many

    cfg.EVAL = CfgNode()  # a nearest-neighbour check while training
    cfg.EVAL.KNN_PERIOD = 0  # epochs between two checks; 0 is never
    cfg.EVAL.KNN_TRAIN = ""  # class folders, for the neighbours
    cfg.EVAL.KNN_VAL = ""  # class folders, for the questions
    cfg.EVAL.KNN_K = 20
    cfg.EVAL.KNN_TEMPERATURE = 0.07

    cfg.LOG = CfgNode()
    cfg.LOG.PERIOD = 50  # steps between two lines
    return cfg


# Keys that say where or how, not what: two runs that differ only here give the same numbers.
WITHOUT_EFFECT_ON_RESULTS = (
    "OUTPUT_DIR",
    "LABEL",
    "DATA.TRAIN",  # the data's fingerprint stands for it
    "DATA.NUM_WORKERS",
    "DATA.CACHE_DIR",
    "CHECKPOINT",
    "EVAL",
    "LOG",
)
