"""Knowledge distillation: teachers, and the losses that a student learns from."""
