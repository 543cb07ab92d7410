"""What others published for steps they recorded, and what our policies, judge and clock make of the same steps."""
