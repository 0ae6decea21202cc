"""The tensor cache: what autograd saved, and in which state it is."""
