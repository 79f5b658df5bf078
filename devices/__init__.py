"""What torch computes on: the choice of a device, its memory, its precision, the shapes that suit it."""
