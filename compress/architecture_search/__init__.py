"""Architecture search: train a network whose sub-networks share its weights, and find the best one within limits."""
