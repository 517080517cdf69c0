"""How good a backbone is: probes of its frozen features, and fine-tuning on few labels.

    run, evaluate    one evaluation: claiming its folder; from its data to its records
    protocols        names and hashes what was measured
    backbone, calibration  loads the backbone whole, freezes it, proves it unchanged
    data/            class folders, annotated sets, subsets, views of images, features on disk
    probes/online    protocol imagenet-linear-moco: the paper's probe, new views in every epoch
    probes/cached    protocol linear-cached: a grid trained together (sgd_grid) or L-BFGS (lbfgs)
    probes/knn       protocols knn20-T0.07 and the like, one per k
    probes/svm       protocols voc07-svm and voc07-low-shot-svm, with two solvers (svm_fits)
    probes/linear_suite  protocol linear-suite: many sets, their scores and the mean
    probes/finetune  protocols finetune-…: the whole network on few labels
    score, record    scores, and the record that holds them
    checkpoint       what a probe resumes from
    splits           everything random, as a function of the seed
    commands/        the command

Nothing is ever chosen on val: the online probe and fine-tuning report their last epoch, the others
choose on images or folds of train, and nearest neighbors choose nothing.
"""
