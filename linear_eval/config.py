"""Every key of a linear evaluation, with its default: exactly MoCo's ImageNet probe.

The comment of a key is its documentation: `--print-config` and docs/config.md show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fvcore.common.config import CfgNode

from kscl.config.merge import load_config
from linear_eval.rules import CENTER, FLIP, check_linear_eval


def linear_eval_defaults() -> CfgNode:
    """Return a new tree with every key of a linear evaluation."""
    cfg = CfgNode()
    cfg.OUTPUT_DIR = "output/linear_eval"  # The folder for log, classifier and record.
    # The name of the row on the leaderboard; "" is the method that the file of weights names.
    cfg.LABEL = ""
    cfg.SEED = 0  # Seeds the classifier, the order of images, random crops and random weights.
    # A linear classifier trained on augmented images (online) or on stored features (cached),
    # nearest neighbors without training (knn), SVMs on images with several classes each, trained on
    # all of them (svm) or on k of each class (low_shot), logistic regression on many sets
    # (linear_suite), or the whole network trained further (finetune).
    cfg.PROBE = "online"

    cfg.BACKBONE = CfgNode()
    # A file of weights, of this project or another one, or random.
    cfg.BACKBONE.WEIGHTS = ""
    # Where in the file the tensors are, for a file with several networks or an unknown layout: the
    # keys that lead to them, joined by dots. "" goes by the table of layouts (docs/checkpoints.md).
    cfg.BACKBONE.CONTAINER = ""
    # What stands before the network's names there, letter by letter; "" as for CONTAINER.
    cfg.BACKBONE.PREFIX = ""
    cfg.BACKBONE.NAME = ""  # The timm model, if the file does not name it.
    # Arguments for timm.create_model; any key is allowed.
    cfg.BACKBONE.KWARGS = CfgNode(new_allowed=True)
    # BatchNorm statistics: keep those of the weights, or calibrate them on training images. Random
    # weights have none, and without them are not a fair baseline: auto calibrates these only.
    cfg.BACKBONE.BATCH_NORM = "auto"
    cfg.BACKBONE.CALIBRATION_IMAGES = 1024  # Training images for the calibration.

    cfg.DATA = CfgNode()
    # To train on: a folder with one folder per class. For svm and low_shot an annotated set:
    # voc:FOLDER:SPLIT, coco:FILE.json:IMAGES or a name such as voc_2007_trainval.
    cfg.DATA.TRAIN = ""
    cfg.DATA.VAL = ""  # To evaluate on: the same with the same classes.
    # Training images per class; 0 is all of them, n draws n of each class (low-shot).
    cfg.DATA.IMAGES_PER_CLASS = 0
    # Fraction of the training images of each class, drawn by SEED (at least one image of each).
    cfg.DATA.FRACTION = 1.0
    # A list of the training images to use, by file name or by path below DATA.TRAIN: a file, or
    # SimCLR's lists for ImageNet, simclr_1percent and simclr_10percent, which are downloaded.
    cfg.DATA.SUBSET = ""
    cfg.DATA.NUM_WORKERS = 4  # Loader processes per rank; 0 loads in the main process.
    cfg.DATA.MAX_PIXELS = 178_956_970  # A larger image is not decoded, which is an error here.
    # The folder for the index of image files and for features; "" is the user's cache folder.
    cfg.DATA.CACHE_DIR = ""

    cfg.INPUT = CfgNode()
    cfg.INPUT.SIZE = 224  # Width and height of the input, in pixels.
    cfg.INPUT.RESIZE = 256  # Length of the short side before the center crop, in pixels.
    cfg.INPUT.INTERPOLATION = "bilinear"  # How images are resized.
    # Mean of red, green and blue; [] is what the file of weights says, or that of its project.
    cfg.INPUT.MEAN = []
    # Standard deviation of red, green and blue; [] as for MEAN.
    cfg.INPUT.STD = []
    # Training view of the online probe: a random crop with a flip, or the center crop.
    cfg.INPUT.AUGMENT = "random_resized_crop"
    cfg.INPUT.SCALE = [0.08, 1.0]  # Smallest and largest fraction of the area of a random crop.
    cfg.INPUT.RATIO = [3 / 4, 4 / 3]  # Smallest and largest width over height of a random crop.
    cfg.INPUT.FLIP = 0.5  # Probability of a horizontal flip.

    cfg.SOLVER = CfgNode()
    cfg.SOLVER.EPOCHS = 100  # Passes over the training images or features.
    cfg.SOLVER.BATCH_SIZE = 256  # Images per step, over all ranks.
    # Learning rate of the online probe, never scaled; the cached probe searches CACHED.LRS.
    cfg.SOLVER.BASE_LR = 30.0
    cfg.SOLVER.MOMENTUM = 0.9  # Momentum of SGD.
    cfg.SOLVER.WEIGHT_DECAY = 0.0  # Weight decay of the online probe.
    # How the learning rate falls, once per epoch: in steps, or along a cosine.
    cfg.SOLVER.SCHEDULE = "step"
    cfg.SOLVER.MILESTONES = [60, 80]  # Epochs after which the step schedule lowers it.
    cfg.SOLVER.GAMMA = 0.1  # Factor of the step schedule at each milestone.
    cfg.SOLVER.INIT_STD = 0.01  # Standard deviation of the initial weights; biases start at 0.
    cfg.SOLVER.AMP = "off"  # Mixed precision of the backbone; the classifier has full precision.
    # Let GPUs multiply float32 numbers rounded to 10 bits (TF32), which is another precision.
    cfg.SOLVER.TF32 = False

    cfg.CACHED = CfgNode()  # The cached probe.
    # Fixed views whose features are stored. Other probes on stored features store all of them too,
    # in one pass, so that no image is decoded twice for two probes of one backbone.
    cfg.CACHED.VIEWS = [CENTER, FLIP]
    cfg.CACHED.RANDOM_CROPS = 0  # Number of fixed random crops per image in addition.
    # Scale every feature to mean 0 and variance 1 over the training features.
    cfg.CACHED.STANDARDIZE = True
    cfg.CACHED.METHOD = "sgd"  # SGD, or full-batch logistic regression (lbfgs).
    cfg.CACHED.LRS = [0.001, 0.01, 0.1, 1.0]  # Learning rates of the grid of sgd.
    cfg.CACHED.WEIGHT_DECAYS = [0.0, 0.0001, 0.001, 0.01]  # Weight decays of the grid of sgd.
    # The grid of lbfgs, which minimizes the mean loss plus L2 / 2 times the squared weights.
    cfg.CACHED.L2 = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    cfg.CACHED.LBFGS_ITERATIONS = 1000  # Largest number of iterations of lbfgs.
    # Fraction of the training images that chooses the point of the grid.
    cfg.CACHED.HOLD_OUT = 0.1

    cfg.KNN = CfgNode()  # The nearest-neighbor probe.
    cfg.KNN.K = [20, 200]  # Numbers of neighbors; each has a record.
    cfg.KNN.TEMPERATURE = 0.07  # Neighbors vote with weight exp(cosine / temperature).

    cfg.SVM = CfgNode()  # One linear SVM per class, on features of length 1.
    cfg.SVM.COSTS = [0.01, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 50.0, 100.0, 1000.0]  # The grid.
    cfg.SVM.FOLDS = 3  # Parts of the training images, by which each class chooses its cost.
    cfg.SVM.POSITIVE_WEIGHT = 2.0  # Weight of an image with the class beside one without it.
    # The LinearSVC of scikit-learn, or the exact minimum of its objective, which is faster if
    # there are few images.
    cfg.SVM.SOLVER = "liblinear"
    cfg.SVM.TOLERANCE = 1e-4  # Of liblinear: where it stops.
    cfg.SVM.ITERATIONS = 2000  # Of liblinear: where it stops at the latest.

    cfg.LOW_SHOT = CfgNode()
    cfg.LOW_SHOT.K = [1, 2, 4, 8, 16, 32, 64, 96]  # Images with a class that its SVM is trained on.
    cfg.LOW_SHOT.SAMPLES = 5  # Independent draws of these images; each has a record.
    cfg.LOW_SHOT.COST_OF_ONE = 1.0  # Cost for k = 1, where one image cannot be split into folds.

    cfg.FINETUNE = CfgNode()  # Its epochs, batches and schedule are SOLVER's.
    cfg.FINETUNE.TRUNK_LR = 0.02  # Learning rate of the backbone.
    cfg.FINETUNE.HEAD_LR = 5.0  # Learning rate of the new linear layer.

    cfg.LINEAR_SUITE = CfgNode()
    # The grid of weight decays: 45 from 1e-6 to 1e5, the ratio of neighbors being equal.
    cfg.LINEAR_SUITE.WEIGHT_DECAYS = [10 ** (-6 + n / 4) for n in range(45)]
    cfg.LINEAR_SUITE.HOLD_OUT = 0.2  # Fraction of train to choose on if a set has no val.
    cfg.LINEAR_SUITE.ITERATIONS = 1000  # Largest number of iterations of L-BFGS.
    # The sets of the linear suite by name; any name is allowed. Each has train, test, perhaps val
    # (folders with one folder per class, or annotated sets) and metric: top1, mean_per_class, or
    # voc07_map for annotated sets. {} leaves out a set of the config file.
    cfg.SETS = CfgNode(new_allowed=True)

    cfg.CHECKPOINT = CfgNode()
    cfg.CHECKPOINT.SECONDS = 60.0  # Seconds between two checkpoints.
    return cfg


# Keys that say where or how, not what: two runs that differ only here give the same numbers.
WITHOUT_EFFECT_ON_RESULTS = (
    "OUTPUT_DIR",
    "LABEL",
    "BACKBONE.WEIGHTS",  # the hash of the file replaces it
    "DATA.TRAIN",  # the fingerprints of the data replace them
    "DATA.VAL",
    "DATA.NUM_WORKERS",
    "DATA.CACHE_DIR",
    "DATA.MAX_PIXELS",  # a larger image is an error
    "CHECKPOINT",
)


def load_linear_eval_config(
    config_file: str | Path | None = None, overrides: Sequence[str] = ()
) -> CfgNode:
    """Return the merge of defaults, file and overrides, checked as a whole and frozen."""
    return load_config(config_file, overrides, linear_eval_defaults, check_linear_eval)
