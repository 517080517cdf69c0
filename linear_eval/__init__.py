"""How good frozen features are: linear probes and nearest neighbours.

    data, views      labelled class folders, and what is shown of each picture
    backbone         loaded whole, frozen, proven unchanged
    features         fixed views through the backbone once, kept on disk
    online           protocol imagenet-linear-moco: the paper's probe, every epoch sees images anew
    cached           protocol linear-cached: a grid trained together (grid) or L-BFGS (lbfgs)
    nearest          protocol knn
    metrics, report  scores and the record; protocols names what was measured
    run, cli         one evaluation, and the command

Nothing is ever chosen on val: the online probe reports its last epoch, the cached one chooses on
images held out of train, nearest neighbours choose nothing.
"""
