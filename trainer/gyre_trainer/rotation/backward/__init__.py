"""What forward leaves for backward: tensors, random states, and gradients that wait."""
