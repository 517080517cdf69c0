"""Every key of a pretraining config, with its default: the paper's setting (K = 5, rho = 40 %).

The comment of a key is its documentation: `--print-config` and docs/config.md show it.
"""

from __future__ import annotations

from fvcore.common.config import CfgNode

from kscl.views.recipes import MOCO_V2


def pretrain_defaults() -> CfgNode:
    """Return a new tree with every key of a pretraining."""
    cfg = CfgNode()
    cfg.OUTPUT_DIR = "output/pretrain"  # The folder for checkpoints, logs, backbone and record.
    cfg.SEED = 0  # Seeds weights, order of images and views; equal seeds give equal runs.
    cfg.LABEL = "kscl"  # The name of the row on the leaderboard; it changes no result.

    cfg.DATA = CfgNode()
    # The images: a folder, a .txt list of files, tar shards, or voc:FOLDER:SPLIT.
    cfg.DATA.TRAIN = ""
    cfg.DATA.NUM_WORKERS = 4  # Loader processes per rank; 0 loads in the training process.
    # What to do with an unreadable image: skip replaces it by another one, error stops the run.
    cfg.DATA.BAD_IMAGES = "skip"
    cfg.DATA.MAX_BAD_FRACTION = 0.01  # A larger fraction of unreadable images stops the run.
    # A larger image is not decoded, but counted as unreadable.
    cfg.DATA.MAX_PIXELS = 178_956_970
    # The folder for the index of image files; "" is the user's cache folder.
    cfg.DATA.CACHE_DIR = ""
    # Gigabytes of remote tar shards that are kept in the cache folder at most; 0 keeps all.
    cfg.DATA.CACHE_GB = 0.0
    # Decode a large JPEG at 1/2, 1/4 or 1/8 of its size, if every sampled crop still has at least
    # the pixels that it is resized to; faster, and pixels differ a little.
    cfg.DATA.REDUCED_DECODE = False
    # Megabytes of memory per rank for decoded pictures, shared out among its workers: a set that
    # fits is decoded once, not in every epoch. 0 keeps none.
    cfg.DATA.KEEP_MEGABYTES = 512
    # Send views from the workers as bytes and normalize them on the training device.
    cfg.DATA.NORMALIZE_ON_DEVICE = True

    cfg.INPUT = CfgNode()
    # Width and height of a full-size view, in pixels; or a schedule over epochs, a list of [first
    # epoch, size] such as [[0, 160], [100, 224]].
    cfg.INPUT.SIZE = 224
    cfg.INPUT.MEAN = [0.485, 0.456, 0.406]  # Subtracted from red, green and blue in [0, 1].
    cfg.INPUT.STD = [0.229, 0.224, 0.225]  # Red, green and blue are divided by it.

    # The augmentations in their order: a list of ops, or the name of a recipe (moco_v1, moco_v2 or
    # simclr).
    cfg.AUGMENT = [dict(op) for op in MOCO_V2]
    # The augmentations of the keys, if they are not those of AUGMENT: a list or a recipe's name.
    # With METHOD.SYMMETRIC they are those of all views but the first.
    cfg.AUGMENT_KEYS = None

    cfg.VIEWS = CfgNode()
    # Small crops of each image (multi-crop), which are queries beside the full-size ones.
    cfg.VIEWS.SMALL = CfgNode()
    cfg.VIEWS.SMALL.COUNT = 0  # Small crops per image.
    cfg.VIEWS.SMALL.SIZE = 96  # Width and height of a small crop, in pixels.
    # Fraction of the image's area that a small crop shows; it replaces the scale of AUGMENT's crop.
    cfg.VIEWS.SMALL.SCALE = [0.05, 0.14]

    cfg.BACKBONE = CfgNode()
    cfg.BACKBONE.NAME = "resnet50"  # Any timm model that returns pooled features.
    # Arguments for timm.create_model that choose the architecture.
    cfg.BACKBONE.KWARGS = CfgNode(new_allowed=True)
    # Weights to start from: a file or an http(s) address; "" draws random ones from SEED.
    cfg.BACKBONE.WEIGHTS = ""
    # Where in the file the tensors are, for a file with several networks or an unknown layout: the
    # keys that lead to them, joined by dots. "" goes by the table of layouts (docs/checkpoints.md).
    cfg.BACKBONE.CONTAINER = ""
    # What stands before the network's names there, letter by letter; "" as for CONTAINER.
    cfg.BACKBONE.PREFIX = ""

    cfg.PROJECTOR = CfgNode()  # The layers between backbone and embeddings; dropped after training.
    cfg.PROJECTOR.TYPE = "mlp"  # Two layers (mlp), with BatchNorm (mlp_bn), or one (linear).
    # Width of the hidden layer; 0 is the backbone's feature dimension.
    cfg.PROJECTOR.HIDDEN_DIM = 0
    cfg.PROJECTOR.DIM = 128  # Dimension of the embeddings (the paper's D).

    cfg.METHOD = CfgNode()
    cfg.METHOD.NUM_SHOTS = 5  # Key views per image (the paper's K).
    # Full-size query views per image, all compared with the one subspace of its keys.
    cfg.METHOD.NUM_QUERIES = 1
    cfg.METHOD.RHO = 0.4  # Fraction of the eigenvalue mass that an instance subspace keeps.
    # Compare a query with the subspace of the keys (projection), the one key of K = 1 (cosine), or
    # the mean of the keys (mean_cosine, a control).
    cfg.METHOD.SIMILARITY = "projection"
    # How eigenvalues are found: by torch's eigh, or for up to 8 shots by Jacobi rotations (jacobi),
    # which a GPU does without the host waiting for it.
    cfg.METHOD.EIGH = "eigh"
    cfg.METHOD.TEMPERATURE = 0.2  # Divides the logits.
    # Let gradients flow through the keys; only with the minibatch dictionary.
    cfg.METHOD.GRAD_THROUGH_KEYS = False
    # Use each view in turn as the query, as SimCLR does; only with the minibatch dictionary.
    cfg.METHOD.SYMMETRIC = False

    cfg.KEY_ENCODER = CfgNode()
    # A momentum encoder, or the query encoder itself (shared).
    cfg.KEY_ENCODER.TYPE = "momentum"
    # Fraction of the old weights that the momentum encoder keeps per step.
    cfg.KEY_ENCODER.MOMENTUM = 0.999
    # BatchNorm of the keys: train uses the statistics of the batch, eval the running statistics of
    # the query encoder.
    cfg.KEY_ENCODER.BATCH_NORM = "train"

    cfg.DICTIONARY = CfgNode()
    # Where the negatives come from: a queue, the other images of the minibatch, or a memory_bank
    # with one slot per image.
    cfg.DICTIONARY.TYPE = "queue"
    cfg.DICTIONARY.QUEUE_LENGTH = 65536  # Instances in the queue.
    # Fraction of the old embeddings that a slot of the memory bank keeps; 0 replaces them.
    cfg.DICTIONARY.BANK_MOMENTUM = 0.0

    cfg.SOLVER = CfgNode()
    cfg.SOLVER.EPOCHS = 200  # Passes over the images.
    # Steps to train for instead of EPOCHS, the last epoch cut short; 0 goes by EPOCHS. The learning
    # rate falls over these steps.
    cfg.SOLVER.MAX_STEPS = 0
    cfg.SOLVER.BATCH_SIZE = 256  # Images per step, over all ranks and accumulation steps.
    cfg.SOLVER.OPTIMIZER = "sgd"  # The optimizer.
    cfg.SOLVER.BASE_LR = 0.03  # Learning rate at REFERENCE_BATCH_SIZE.
    # Scale the learning rate in proportion to BATCH_SIZE / REFERENCE_BATCH_SIZE.
    cfg.SOLVER.SCALE_LR = True
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 256  # The batch size that BASE_LR is meant for.
    cfg.SOLVER.MOMENTUM = 0.9  # Momentum of SGD and LARS.
    cfg.SOLVER.WEIGHT_DECAY = 1e-4  # Weight decay.
    cfg.SOLVER.SCHEDULE = "cosine"  # How the learning rate falls: along a cosine, or in steps.
    cfg.SOLVER.LR_UPDATE = "epoch"  # Change the learning rate every epoch or every iteration.
    cfg.SOLVER.MILESTONES = [120, 160]  # Epochs after which the step schedule lowers it.
    cfg.SOLVER.GAMMA = 0.1  # Factor of the step schedule at each milestone.
    # Epochs in which the learning rate rises from 0; fractions are allowed.
    cfg.SOLVER.WARMUP_EPOCHS = 0.0
    # Parts in which a rank computes its images of a batch, to save memory.
    cfg.SOLVER.GRAD_ACCUM_STEPS = 1
    cfg.SOLVER.CLIP_GRAD_NORM = 0.0  # Largest norm of the gradient; 0 clips nothing.
    cfg.SOLVER.AMP = "off"  # Mixed precision.
    cfg.SOLVER.CHANNELS_LAST = False  # Memory layout that is often faster for convolutions.
    # Compile both encoders before the first step, by inductor, which needs a C++ compiler, or by
    # aot_eager, which only shows that they can be.
    cfg.SOLVER.COMPILE = "off"
    # Let GPUs multiply float32 numbers rounded to 10 bits (TF32), which is faster.
    cfg.SOLVER.TF32 = False
    # Let cuDNN time its convolutions and take the fastest; its choice can change from run to run.
    cfg.SOLVER.CUDNN_BENCHMARK = False
    # Use only GPU kernels that repeat their results to the bit; slower.
    cfg.SOLVER.DETERMINISTIC = False

    cfg.CHECKPOINT = CfgNode()
    cfg.CHECKPOINT.PERIOD_EPOCHS = 1  # Epochs between two checkpoints.
    cfg.CHECKPOINT.PERIOD_STEPS = 0  # Steps between two checkpoints within an epoch; 0 is never.
    cfg.CHECKPOINT.KEEP = 2  # Number of newest checkpoints to keep.

    cfg.EVAL = CfgNode()  # A nearest-neighbor check during training; it changes no weights.
    cfg.EVAL.KNN_PERIOD = 0  # Epochs between two checks; 0 is never.
    cfg.EVAL.KNN_TRAIN = ""  # Class folders with the labeled neighbors.
    cfg.EVAL.KNN_VAL = ""  # Class folders with the images to classify.
    cfg.EVAL.KNN_K = 20  # Number of neighbors.
    cfg.EVAL.KNN_TEMPERATURE = 0.07  # Neighbors vote with weight exp(cosine / temperature).

    cfg.LOG = CfgNode()
    cfg.LOG.PERIOD = 50  # Steps between two log lines.
    return cfg


# Keys that say where or how, not what: two runs that differ only here give the same numbers.
WITHOUT_EFFECT_ON_RESULTS = (
    "OUTPUT_DIR",
    "LABEL",
    "DATA.TRAIN",  # the fingerprint of the data replaces it
    "DATA.NUM_WORKERS",
    "DATA.CACHE_DIR",
    "DATA.CACHE_GB",
    "DATA.KEEP_MEGABYTES",
    "SOLVER.CUDNN_BENCHMARK",
    "CHECKPOINT",
    "EVAL",
    "LOG",
)
