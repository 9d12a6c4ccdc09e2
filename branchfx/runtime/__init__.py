"""What runs at every step: the token tree of the batch, the choice of a schedule, the packed graph."""
