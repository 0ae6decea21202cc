"""What the planner chooses and predicts, against what is measured; the projection."""
