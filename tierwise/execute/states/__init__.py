"""Parameters, gradients and optimizer state with homes of their own, and updates that run where the plan says."""
