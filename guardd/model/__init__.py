"""Pure values and rules of the guard: no IO, no clock."""
