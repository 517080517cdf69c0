"""How good a backbone is: probes of its frozen features, and fine-tuning on few labels.

    probe            what all probes share: the way from data to features to records
    probes/          one file per probe: its keys, rules, protocol, training and scores
        online       protocol imagenet-linear-moco: the paper's probe, new views in every epoch
        cached       protocols linear-cached and linear-cached-lbfgs: a grid on stored features
        knn          protocols knn20-T0.07 and the like, one per k
        svm          protocols voc07-svm and voc07-low-shot-svm
        linear_suite protocol linear-suite: many sets, their scores and the mean
        finetune     protocols finetune-…: the whole network on few labels
    config           the keys that all probes share
    images           class folders, annotated sets, parts of train, and the views of their images
    backbone         loads the backbone whole, freezes it, proves it unchanged
    features         features on disk
    linear           linear classifiers on stored features, by SGD and L-BFGS
    score            scores, and what a probe returns
    check            what would stop an evaluation; images that are trained and tested on

Everything random is a function of the seed. Nothing is ever chosen on val: the online probe and
fine-tuning report their last epoch, the others choose on images or folds of train, and nearest
neighbors choose nothing.
"""
