"""Training in several processes with DeepSpeed: launch, configuration, failures, checkpoints."""
