"""Graph traversal over edge lists in host memory."""
