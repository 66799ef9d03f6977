"""Choice of the fastest trees, threads and weight formats on this machine, by measured costs."""
