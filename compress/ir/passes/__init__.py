"""TODO compress/ir/passes."""
