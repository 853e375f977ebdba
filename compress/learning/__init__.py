"""What changes weights: training, pruning, distillation, quantization, and the replacement of layers."""
