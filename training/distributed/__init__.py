"""DeepSpeed: processes, launchers, configuration, checkpoints."""
