"""A suite on a SLURM cluster: one job per stage, states from notes and squeue."""
