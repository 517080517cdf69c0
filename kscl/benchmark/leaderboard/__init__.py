"""The leaderboard: run records in; Markdown, CSV, JSON and one self-contained page out.

It imports no evaluator. What an evaluator has to put into its record (see `kscl/records/record.py`)
for its numbers to find their row is this contract; whatever is optional may be missing, and leaves
a cell or a panel empty.

**Linking.** A `pretrain` record says in `details["outputs"]["backbone"]` the sha256 of the backbone
file it made. An evaluation says in `inputs["backbone"]` the sha256 of the backbone it started from,
however many conversions lie between. Equal hashes link the two. An evaluation of a backbone that no
pretraining record made (random, supervised, somebody else's checkpoint) describes it itself, in
`details["backbone"]`: {"method", "similarity", "arch", "kwargs", "epochs", "num_shots", "rho",
"seed"}; other words in it are ignored. Evaluations of equal hashes are of one backbone, and what
one of them leaves out is taken from the others. Files are replicates of one contender only if both
name a method and a seed.

**Contenders.** A row is a contender: method, backbone, epochs, K, rho, the hash of the pretraining
config without its seed, and the fingerprint of the pretraining data. Its pretraining seeds are the
replicates; evaluations of one backbone under several seeds are trials of one replicate.

**Metrics** are percent: `linear` has top1, top5; `knn` top1; `detection` AP, AP50, AP75 of the
scorer that the protocol names. `pretrain` has mean_rank, minutes_per_epoch, views_per_second.

**Protocols.** Numbers meet only where kind, protocol id and protocol hash are equal; the hash
covers the fingerprints of the evaluation's data (see `make_record`).

**Optional details.**
- `per_class`: class name → number, or → {metric: number}, or a list beside `classes`
- `n`: how many test images; `confidence_interval`: [low, high], or metric → [low, high]
- `curves`: {"epoch" or "step": [...], name: [...]}, thinned
- `files`: role → path, relative to the record; linked from the page. The role "backbone" is checked
  against `outputs["backbone"]` as long as the file is there
- `basis_figure`: path of a PNG, JPEG or WebP, relative to the record; it is put into the page.
  Without it, a file basis.png beside a pretraining's record is taken
- `certificate`: what the conversion proved; shown as it is
- `data[role]["path"]` in the record proper: where the fingerprinted data lies, so that a change of
  it can be noticed later (for pretraining, DATA.TRAIN of its config will do)
"""
