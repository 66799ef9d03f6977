"""Trees, threads and formats of weights that are fastest on this machine, by measured costs."""
