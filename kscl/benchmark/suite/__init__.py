"""The whole chain from one file: contenders and evaluations in, stages run, one leaderboard out."""
