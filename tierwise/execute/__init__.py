"""Plans on real tensors: devices, the memory and files that hold bytes, and what moves them."""
