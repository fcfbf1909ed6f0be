"""Look inside a model: the shapes of a forward pass, attention weights, and word alignments."""
