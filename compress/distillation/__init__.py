"""TODO compress/distillation."""
