"""Knowledge distillation: teachers, and the losses of a student."""
