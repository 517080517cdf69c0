"""Evaluate a backbone: probes of its frozen features, and fine-tuning on few labels.

`probe.py` is what all probes share; each file in `probes/` is one probe with its keys, rules,
protocol, training and scores. Everything random is a function of the seed. Nothing is ever chosen
on val: the online probe and fine-tuning report their last epoch, the others choose on images or
folds of train, and nearest neighbors choose nothing.
"""
