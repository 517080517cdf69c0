"""The leaderboard: run records in; Markdown, CSV, JSON and one self-contained page out.

It imports no evaluator. This contract says what an evaluator has to put into its record (see
`kscl/records/record.py` and docs/record.md) for its numbers to find their row. Whatever is optional
may be missing, and then leaves a cell or a panel empty.

**Linking.** A `pretrain` record gives in `details["outputs"]["backbone"]` the sha256 of the
backbone file it made. An evaluation gives in `inputs["backbone"]` the sha256 of the backbone it
started from, however many conversions are between the two. Equal hashes link them. An evaluation of
a backbone that no pretraining record made (random, supervised, somebody else's checkpoint)
describes it in `details["backbone"]`: {"method", "similarity", "arch", "kwargs", "epochs",
"num_shots", "rho", "seed"}; other keys in it are ignored. Evaluations with equal hashes are of one
backbone, and what one of them leaves out is taken from the others. Files are replicates of one
entry only if both name a method and a seed.

**Entries.** A row is an entry: method (the run's LABEL), backbone, epochs, K, rho, the hash of the
pretraining config without its seed, and the fingerprint of the pretraining data. Its pretraining
seeds are the replicates; evaluations of one backbone with several seeds are trials of one
replicate.

**Metrics.** A record describes its own in `task.metrics`: label, digits, which one ranks, and its
direction. Those that it does not describe, such as a detector's by another scorer, are in the CSV
and on the page only. Of a `pretrain` record, columns.py shows what has a column.

**Protocols.** Numbers are compared only if kind, protocol id, protocol hash and the metric that
ranks are equal; the hash covers the fingerprints of the evaluation's data (see `make_record`).

**Optional details.**
- `per_class`: class name → number, or → {metric: number}, or a list beside `classes`
- `n`: the number of test images; `confidence_interval`: [low, high], or metric → [low, high]
- `warnings`: a list of sentences that stand beside the row, such as a choice at the edge of a grid
- `curves`: {"epoch" or "step": [...], name: [...]}, thinned
- `files`: role → path, relative to the record; linked from the page. The role "backbone" is checked
  against `outputs["backbone"]` as long as the file exists
- `basis_figure`: path of a PNG, JPEG or WebP, relative to the record; it is embedded in the page.
  Without it, a file basis.png beside a pretraining's record is used
- `pictures`: path of such a picture that shows predictions on test images beside the truth
- `costs`: {"peak_memory_gib", "peak_gpu_memory_gib"} of the run
- `right`: which test images were correct (`kscl.records.hits`), so that two rows can be paired
- `resampled_METRIC`: the metric that ranks on resamples of the test images, the same ones for all
  records of the protocol; `resampled_AP` for detectors
- `certificate`: what the conversion proved; shown as it is
- `data[role]["path"]` in the record proper: where the fingerprinted data is, so that a change of it
  can be noticed later (for pretraining, DATA.TRAIN of its config is enough)
"""
