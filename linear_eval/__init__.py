"""How good frozen features are: linear probes and nearest neighbors.

    run              one evaluation, from claiming its folder to its record
    protocols        names and hashes what was measured
    backbone         loads the backbone whole, freezes it, proves it unchanged
    data/            labeled class folders, views of their images, features kept on disk
    probes/online    protocol imagenet-linear-moco: the paper's probe, new views in every epoch
    probes/cached    protocol linear-cached: a grid trained together (sgd_grid) or L-BFGS (lbfgs)
    probes/knn       protocol knn
    score, record    scores, and the record that holds them
    checkpoint       what a probe resumes from
    splits           everything random, as a function of the seed
    commands/        the command

Nothing is ever chosen on val: the online probe reports its last epoch, the cached one chooses on
images held out of train, and nearest neighbors choose nothing.
"""
