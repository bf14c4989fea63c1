"""How a kernel will look: the plan that strategies offer, before anything of it is text."""
