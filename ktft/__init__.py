"""ktft: LoRA fine-tuning of large Mixture-of-Experts models with the experts in RAM."""
