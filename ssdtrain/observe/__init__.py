"""What is learnt about a step: what it saves, who else holds it, how fast the links
are, what the hooks cost, and the plan that follows from it."""
