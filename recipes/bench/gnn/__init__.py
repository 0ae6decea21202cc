"""GNN epochs with features in host memory."""
