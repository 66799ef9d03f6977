"""Training in several processes by DeepSpeed: launch, configuration, failures, checkpoints."""
