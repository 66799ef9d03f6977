"""The training loop and the files of a run."""
